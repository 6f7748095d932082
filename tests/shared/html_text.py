"""Checks of HTML: closed elements, no external files, and styles that apply only to a fragment."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any


class Reader(HTMLParser):
    """Parser that collects the open elements, the names of all elements, and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.names: set[str] = set()
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.names.add(tag)
        if tag not in {"meta", "br"}:
            self.opened.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def assert_closed(page: str) -> None:
    """Check that the elements of a page are closed in the correct order."""
    assert not Reader(page).opened


def assert_alone(page: str) -> None:
    """Check that a page refers to no other file."""
    links = re.findall(r'(?:src|href|url)\s*[=(]\s*["\']?([^"\')\s>]+)', page)
    assert all(link.startswith("#") for link in links), links


def assert_fragment(shown: str) -> str:
    """Check that a notebook's HTML has no script and no styles for other elements, and return its text."""
    assert_closed(shown)
    assert_alone(shown)
    reader = Reader(shown)
    assert shown.startswith('<div class="cudatma-page">')
    assert "script" not in reader.names
    rules = re.findall(r"([^{}]+)\{", "".join(re.findall(r"<style>(.*?)</style>", shown, re.DOTALL)))
    assert all(rule.strip().startswith((".cudatma-", "@media")) for rule in rules), "nothing outside is touched"
    return reader.text
