"""``python -m cudatma``: the console script, where it is not on the PATH."""

from cudatma.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
