"""TMA operations as functions on arrays."""
