"""Command-line tools. Each module is a subcommand of ``cudatma`` and also runs as ``python tools/NAME.py``.

An installation contains this folder as the package ``cudatma.tools``. In a checkout, cudatma.cli imports the folder
under that name.
"""
