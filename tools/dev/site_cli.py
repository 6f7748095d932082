"""Write the command-line reference of the documentation site from the parsers of the commands."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from unittest import mock

from cudatma import cli
from tools.command_line import parser_of
from tools.dev.site_docstrings import inline

TITLE = "Command line"
INTRODUCTION = """\
``cudatma COMMAND --help`` shows the same text. The exit status is 0 for success, 1 if a check failed, and 2 for an
invalid command line or another error. An error prints one line on standard error.
"""


def page() -> str:
    """Return the page as reStructuredText, with a section for each subcommand."""
    commands = cli.available()
    lines = [TITLE, "=" * len(TITLE), "", INTRODUCTION, ".. list-table::", ""]
    for command, summary in commands.items():
        lines += [f"   * - :ref:`cudatma {command} <cudatma-{command}>`", f"     - {inline(summary, {})}"]
    with mock.patch.dict(os.environ, COLUMNS="88"):
        for command in commands:
            lines += ["", *_section(command, parser_of(cli.COMMANDS[command][0]))]
    return "\n".join(lines) + "\n"


def _section(command: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield from (f".. _cudatma-{command}:", "", parser.prog, "-" * len(parser.prog), "")
    for paragraph in (parser.description or "").strip().split("\n\n"):
        yield from (inline(" ".join(paragraph.split()), {}), "")
    yield from _literal(parser.format_usage().removeprefix("usage: "))
    yield from (f".. program:: {parser.prog}", "")
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if a.help != argparse.SUPPRESS and a.dest != "help"]
        if actions and group.title not in ("options", "positional arguments"):
            about = f": {group.description}" if group.description else ""
            yield from (f".. rubric:: {inline(f'{group.title}{about}', {})}", "")
        for action in actions:
            yield from _option(parser, action)
    yield from _literal(parser.epilog or "")


def _option(parser: argparse.ArgumentParser, action: argparse.Action) -> Iterator[str]:
    formatter = parser._get_formatter()
    default = formatter._get_default_metavar_for_optional(action)
    value = formatter._format_args(action, default) if action.nargs != 0 else ""
    if not action.option_strings:
        value = str(action.metavar or action.dest)
    shown = ", ".join(f"{name} {value}".strip() for name in action.option_strings) or value
    yield from (f".. option:: {shown}", "", f"   {inline(formatter._expand_help(action), {})}", "")


def _literal(text: str) -> Iterator[str]:
    yield from (".. code-block:: text", "", *(f"   {line}" for line in text.strip().splitlines()), "")
