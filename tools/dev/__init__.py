"""What only this repository needs; not in the wheel. Each module runs as ``python tools/dev/NAME.py``."""
