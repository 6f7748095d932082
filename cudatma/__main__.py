"""``python -m cudatma``, the same as the console script."""

from cudatma.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
