"""The rows of the table of wrong calls, by topic, and the bench that they work on."""
