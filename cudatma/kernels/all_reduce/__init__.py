"""One-shot all-reduce of small messages: every rank sends its message to all ranks, and adds what it receives."""
