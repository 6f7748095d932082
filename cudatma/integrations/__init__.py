"""Integrations with other libraries. Each module imports the library that its name contains."""
