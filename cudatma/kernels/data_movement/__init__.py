"""Each TMA operation as a small function on arrays."""
