"""Entry point of ``python -m cudatma``, which is equivalent to the console script ``cudatma``."""

from cudatma.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
