"""One-shot all-reduce of small messages: every rank sends its message to all other ranks, which add the messages."""
