"""One-shot all-reduce of small messages: every rank sends its message to all other ranks, and each rank adds the
messages."""
