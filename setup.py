"""The description that package indexes show: the README up to its measurements, without pictures and links to files of
the repository, which an index does not have. Everything else is in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup

readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
beginning, _, _ = readme.partition("\n## Performance\n")
without_pictures = re.sub(r"^!\[.*\n+", "", beginning, flags=re.MULTILINE)
description = re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", without_pictures)

setup(long_description=description, long_description_content_type="text/markdown")
