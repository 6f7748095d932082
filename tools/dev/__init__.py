"""Tools for this repository. They are not in the wheel. Each module runs as ``python tools/dev/NAME.py``."""
