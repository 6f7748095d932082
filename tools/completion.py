"""Print a script that completes cudatma's commands, options, kernels, kinds of hazards and files in bash or zsh.

bash loads the script from the folder in the example the first time that it completes the command. In zsh, source the
script after compinit. Run this command again after an upgrade. The script was tested with bash 5.2 and zsh 5.9.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # run the subcommand, even if the checkout is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from cudatma.cli import main as cudatma_main

    raise SystemExit(cudatma_main(["completion", *sys.argv[1:]]))

from collections.abc import Iterable, Sequence

from cudatma.cli import COMMANDS, available
from cudatma.emulator.hazards.hazard import CAUSES
from cudatma.kernels.registry import FAMILIES, REGISTRY
from cudatma.target import TARGETS

from .command_line import Parser, parser_of
from .emulate import EMULATED, sample_parser

EXAMPLES = """examples:
  cudatma completion bash > ~/.local/share/bash-completion/completions/cudatma
  cudatma completion zsh > ~/.cudatma.zsh
"""
#: Completions for the arguments of commands, in addition to files and the choices of the parsers.
_ARGUMENTS: dict[str, Iterable[str]] = {
    "dump": (*REGISTRY, *FAMILIES),
    "emulate": EMULATED,
    "explain": (*CAUSES, *FAMILIES),
    "targets": TARGETS,
}
_SCRIPT = """\
_cudatma_words() {
    case "$1" in
@CASES@
    esac
}
_cudatma() {
    local word="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" command="${COMP_WORDS[1]}" name
    local context="$command"
    if [[ $COMP_CWORD == 1 ]]; then
        context=commands
    elif [[ $word == -* ]]; then
        context="$command -"
    elif [[ $previous == -* ]]; then
        context="$command $previous"
    fi
    COMPREPLY=()
    for name in $(_cudatma_words "$context") $(_cudatma_words "$context ${COMP_WORDS[2]-}"); do
        [[ $name == "$word"* ]] && COMPREPLY+=("$name")
    done
    [[ $COMP_CWORD == 1 || $word == -* ]] && return
    while IFS= read -r name; do
        [[ -n $name ]] && COMPREPLY+=("$name")
    done <<< "$(compgen -f -- "$word")"
}
complete -o filenames -F _cudatma cudatma
"""


def words() -> dict[str, list[str]]:
    """Return the completions for each context that the function ``_cudatma`` of the script looks up."""
    result = {"commands": list(available())}
    for command in result["commands"]:
        options = parser_of(COMMANDS[command][0])
        chosen = (choice for action in options.positionals for choice in action.choices or ())
        result[command] = [*chosen, *_ARGUMENTS.get(command, ())]
        result[f"{command} -"] = [name for action in options.options for name in action.option_strings]
        for action in options.options:
            choices = TARGETS if action.dest == "target" else action.choices or ()
            for name in action.option_strings:
                result[f"{command} {name}"] = result[command] if action.nargs == 0 else list(map(str, choices))
    for kernel in EMULATED:
        result[f"emulate - {kernel}"] = [
            name for action in sample_parser(kernel).options for name in action.option_strings
        ]
    return {context: sorted(set(filter(None, names))) for context, names in result.items()}


def script(shell: str) -> str:
    """Return the script for "bash" or "zsh"."""
    contexts: dict[str, list[str]] = {}
    for context, names in words().items():
        contexts.setdefault(" ".join(names), []).append(f'"{context}"')
    cases = "\n".join(f'    {"|".join(group)}) echo "{names}" ;;' for names, group in contexts.items() if names)
    return "autoload -U +X bashcompinit && bashcompinit\n" * (shell == "zsh") + _SCRIPT.replace("@CASES@", cases)


def parser() -> Parser:
    """Return the parser of ``cudatma completion``."""
    result = Parser("cudatma completion", __doc__, EXAMPLES)
    result.add_argument("shell", choices=("bash", "zsh"), help="shell that reads the script")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma completion`` and return the exit status."""
    print(script(parser().parse_args(argv).shell), end="")
    return 0
