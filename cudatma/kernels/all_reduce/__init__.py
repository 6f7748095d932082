"""One-shot all-reduce of small messages: every rank sends its message to all ranks and sums the received messages."""
