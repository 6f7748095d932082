"""One-shot all-reduce: every rank sends its message to all others, which add it up; for small messages."""
