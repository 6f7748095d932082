"""Integrations with other libraries. Each module imports the library after which it is named."""
