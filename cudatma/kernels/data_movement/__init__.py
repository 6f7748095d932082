"""Every TMA operation as a small function over arrays."""
