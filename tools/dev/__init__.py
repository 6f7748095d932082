"""Tools for this repository only; not in the wheel. Each module runs as ``python tools/dev/NAME.py``."""
