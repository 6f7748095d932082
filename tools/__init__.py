"""Command-line tools: each module is a subcommand of ``cudatma`` and also runs as ``python tools/NAME.py``.

An installation has this folder as the package ``cudatma.tools``. In a plain checkout, cudatma.cli gives it that name.
"""
