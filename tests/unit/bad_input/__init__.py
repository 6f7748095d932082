"""The rows of the table of wrong calls, by room, and the bench that they work on."""
