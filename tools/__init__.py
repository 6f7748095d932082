"""What people type: each module here is a subcommand of ``cudatma`` and also runs as ``python tools/NAME.py``.

Installed, this folder is the package ``cudatma.tools``; in a plain checkout cudatma.cli gives it the same name.
"""
