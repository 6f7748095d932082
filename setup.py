"""The description that package indexes show: the README without its pictures and links to files of the repository,
which an index has not. Everything else is in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup

readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
without_pictures = re.sub(r"^!\[.*\n+", "", readme, flags=re.MULTILINE)
description = re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", without_pictures)

setup(long_description=description, long_description_content_type="text/markdown")
