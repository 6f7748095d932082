"""Find the files that a source includes, whose digests are part of the cache key.

NVRTC does not report the files that it reads. The scanner therefore follows every #include, even in disabled code, and
adds every file to which a name could refer. The result may contain too many files, but never too few.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from cudatma.build.files import file_state
from cudatma.build.headers import cuda_headers
from cudatma.errors import ArgumentError

#: Default language standard.
STANDARD_FLAG = "--std=c++17"

_GAP = rb"(?:[ \t\f\v]|/\*[^*]*\*+(?:[^/*][^*]*\*+)*/)*"
_SPLICE = re.compile(rb"\\[ \t]*\r?\n")
_HASH = rb"#" + _GAP
_FILE = rb'(?:<(?P<angle>[^>\n]+)>|"(?P<quoted>[^"\n]+)"'
#: Matches an #include of a file or a macro, including those in comments. The patterns begin with literals, which makes
#: them fast.
_INCLUDE = re.compile(
    _HASH + rb"(?:include(?:_next)?|import)\b" + _GAP + _FILE + rb"|(?P<macro>[A-Za-z_][^\n]*))",
)
_HAS_INCLUDE = re.compile(
    rb"has_include\w*\s*\(" + _GAP + _FILE + rb"|(?P<macro>[A-Za-z_]\w*(?:" + _GAP + rb"\([^()\n]*\))?))", re.IGNORECASE
)
#: Matches a macro that is another name of __has_include. Its uses are not found.
_ALIAS = re.compile(rb"#[ \t]*define[ \t]+\w+[ \t]+__has_include(?:_next)?\b(?![ \t]*\()")
#: Matches the text that may precede a directive on its line.
_BEFORE = re.compile(rb"(?:.*\*/)?" + _GAP)
_MACRO = re.compile(r"(?P<name>\w+)\s*(?:\((?P<argument>[^()]*)\))?\s*(?://.*|/\*.*)?", re.DOTALL)
_WORD = re.compile(r"[A-Za-z_]\w*")
_BODY = re.compile(r"""<(?P<angle>[^>]+)>|"(?P<quoted>[^"]+)\"""")
#: C headers -> their C++ names.
_C_HEADERS = {f"{name}.h": f"c{name}" for name in (
    *("assert", "float", "inttypes", "limits", "math", "stddef", "stdint", "stdio", "stdlib", "string", "time"),
)}  # fmt: skip
#: Headers whose functions are built into NVRTC, such as printf and memcpy.
_EMPTY = ("cstdio", "cstdlib", "cstring", "cassert", "ctime", "cinttypes")
_CCCL = ("cuda", "cub", "thrust", "nv")
_STANDARD = "#pragma once\n#include <cuda/std/{}>\nnamespace std {{ using namespace ::cuda::std; }}\n"


@dataclass(frozen=True, slots=True)
class Includes:
    """Files that a source includes.

    Attributes
    ----------
    files : tuple of tuple
        (path, digest) of each file.
    folders : tuple of str
        CUDA's include folders.
    standard : tuple of tuple
        (name, text) of the headers that replace headers of the host's C++ standard library.
    is_complete : bool
        Whether ``files`` is complete.
    """

    files: tuple[tuple[str, str], ...]
    folders: tuple[str, ...]
    standard: tuple[tuple[str, str], ...]
    is_complete: bool


def option_values(options: Sequence[str], short: str, long: str) -> list[str]:
    """Return the values of an option in any spelling, such as ``-Ix``, ``-I x``, ``-I=x`` and ``--include-path=x``."""
    values, rest = [], iter(options)
    for option in rest:
        if option in (short, long):
            values.append(next(rest, ""))
        elif option.startswith(f"{long}="):
            values.append(option[len(long) + 1 :])
        elif option.startswith(short) and not option.startswith("--"):
            values.append(option[len(short) :].removeprefix("="))
    return values


def includes_of(source: str, options: Sequence[str], folder: str, major: int) -> Includes | None:
    """Return the files that a source in a folder includes, or None if it includes nothing.

    ``options`` are the compiler options. ``major`` is the preferred major version of CUDA's headers.
    """
    text = source.encode(errors="surrogatepass")  # the compiler reports lone surrogates
    directives, first = _Directives(text), option_values(options, "-include", "--pre-include")
    if not (first or directives.names or directives.macros or directives.has_alias):
        return None
    folders = cuda_headers(major)
    search = [os.path.abspath(path) for path in option_values(options, "-I", "--include-path") if path]
    scan = _Scan(folder, [*search, *folders], folders)
    scan.follow(directives, folder)
    scan.follow_names(((name, True) for name in first), os.getcwd())
    is_complete = scan.follow_macros(text, option_values(options, "-D", "--define-macro"))
    is_complete = is_complete and not scan.has_alias
    return Includes(tuple(sorted(scan.files.items())), folders, tuple(sorted(scan.standard.items())), is_complete)


class _Directives:
    """#include directives in a text, as (name, is quoted) for each file, and macros whose values are file names."""

    __slots__ = ("digest", "has_alias", "macros", "names")

    def __init__(self, text: bytes) -> None:
        self.digest = hashlib.sha256(text).hexdigest()
        text = _SPLICE.sub(b"", text).replace(b"%:", b"#")
        self.has_alias = bool(_ALIAS.search(text))
        self.names: set[tuple[str, bool]] = set()
        self.macros: set[str] = set()
        for match in itertools.chain(_INCLUDE.finditer(text), _HAS_INCLUDE.finditer(text)):
            is_question = match.re is _HAS_INCLUDE
            if name := match["angle"] or match["quoted"]:
                self.names.add((os.fsdecode(name.strip()), match["angle"] is None))
            elif is_question or _BEFORE.fullmatch(text, text.rfind(b"\n", 0, match.start()) + 1, match.start()):
                self.macros.add(os.fsdecode(match["macro"].strip()))


@lru_cache(maxsize=16384)
def _directives(path: str, *state: int) -> _Directives:
    """Return the #include directives in a file. ``state`` changes whenever the file changes."""
    del state
    with open(path, "rb") as file:
        return _Directives(file.read())


class _Scan:
    """Scan of a source. ``search`` contains all include folders, and ``cuda`` CUDA's include folders."""

    def __init__(self, folder: str, search: Sequence[str], cuda: Sequence[str]) -> None:
        self.has_alias = False
        self.files: dict[str, str] = {}
        self.standard: dict[str, str] = {}
        self._folder, self._search, self._cuda = folder, search, cuda
        self._cuda_folders = tuple(f"{os.path.realpath(root)}/" for root in cuda)
        self._macros: set[str] = set()
        #: Macros from files outside of CUDA's folders.
        self._own_macros: set[str] = set()
        self._real: dict[str, str] = {}
        self._followed: set[tuple[str, str, bool]] = set()

    def follow(self, directives: _Directives, folder: str) -> None:
        """Add the files that a text in a folder includes, directly or indirectly."""
        self._macros |= directives.macros
        self._own_macros |= directives.macros
        self.has_alias |= directives.has_alias
        self.follow_names(directives.names, folder)

    def follow_names(self, names: Iterable[tuple[str, bool]], folder: str) -> None:
        """Add the files to which (name, is quoted) can refer in a folder, and all files that they include."""
        waiting = [(name, is_quoted, folder, False) for name, is_quoted in names]
        while waiting:
            name, is_quoted, folder, is_cccl = waiting.pop()
            here = folder if is_quoted else ""
            if (name, here, is_cccl) in self._followed:
                continue
            self._followed.add((name, here, is_cccl))
            paths = list(self._paths(name, here))
            for path in paths:
                if path not in self.files:
                    directives = _directives(path, *file_state(path))
                    self.files[path] = directives.digest
                    self._macros |= directives.macros
                    if not path.startswith(self._cuda_folders):
                        self._own_macros |= directives.macros
                        self.has_alias |= directives.has_alias
                    waiting += [(*other, os.path.dirname(path), self._is_cccl(path)) for other in directives.names]
            if not paths and not is_cccl and (text := self._standard(name)) is not None:
                self.standard[name] = text
                waiting += [(*other, "/", True) for other in _Directives(text.encode()).names]

    def _is_cccl(self, path: str) -> bool:
        """Return whether a file belongs to libcu++, CUB or Thrust, which do not need the standard library."""
        return any(path.startswith(f"{root}/{part}/") for root in self._cuda for part in _CCCL)

    def _paths(self, name: str, folder: str) -> Iterator[str]:
        """Yield every file to which a name can refer."""
        for place in dict.fromkeys([folder, self._folder if folder else "", *self._search]):
            path = os.path.join(place, name)
            if place and _is_regular(path):
                # normpath() would change the meaning of ".." after a symbolic link.
                above, _, file = path.rpartition("/")
                if above not in self._real:
                    self._real[above] = os.path.realpath(above)
                yield f"{self._real[above]}/{file}"

    def _standard(self, name: str) -> str | None:
        """Return the replacement for a header of the standard library, or None if CUDA and NVRTC do not provide it."""
        plain = _C_HEADERS.get(name, name)
        if "/" not in plain and any(os.path.isfile(f"{root}/cuda/std/{plain}") for root in self._cuda):
            return _STANDARD.format(plain)
        return "" if plain in _EMPTY else None

    def follow_macros(self, text: bytes, defines: Sequence[str]) -> bool:
        """Add the files whose names are values of macros, and return whether all values are known.

        Macros in CUDA's headers do not affect the result, because a new CUDA release also changes other files.
        ``defines`` contains NAME=VALUE from the compiler's options.
        """
        command_line = "".join(f"#define {define.replace('=', ' ', 1)}\n" for define in defines).encode()
        resolved: set[str] = set()
        is_complete = True
        while macros := self._macros - resolved:
            resolved |= macros
            texts = [text, command_line, *map(_read, self.files)]
            definitions = _definitions({_name(macro) for macro in macros}, texts)
            words: set[str] = set()
            for macro in macros:
                names = _macro_names(macro, definitions)
                if macro in self._own_macros:
                    is_complete = is_complete and bool(names)
                    words.update(word for name, is_quoted in names if not is_quoted for word in _WORD.findall(name))
                # The macro may be used in a file in any folder.
                for folder in {os.path.dirname(path) for path in self.files} | {self._folder}:
                    self.follow_names(names, folder)
            # The preprocessor expands macros between angle brackets.
            is_complete = is_complete and not _is_any_defined(words, texts)
        return is_complete


def _is_regular(path: str) -> bool:
    """Return whether a file exists and is regular. Raise ArgumentError for a FIFO, because NVRTC would hang."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    if stat.S_ISFIFO(mode):
        raise ArgumentError("#include", path, "a regular file")
    return stat.S_ISREG(mode)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _name(macro: str) -> str:
    """Return the name of the macro in ``NAME(argument)``."""
    return re.match(r"\w*", macro)[0]  # type: ignore[index]


def _definitions(names: Iterable[str], texts: Iterable[bytes]) -> dict[str, list[tuple[str, str]]]:
    """Return (parameter, body) of each definition of these macros in the texts."""
    definitions: dict[str, list[tuple[str, str]]] = {name: [] for name in names}
    patterns = {
        name: re.compile(_HASH + rb"define" + _GAP + name.encode() + rb"(?:\((\w*)\))?[ \t]([^\n]*)")
        for name in definitions
    }
    for text in texts:
        for name, pattern in patterns.items():
            if name.encode() in text:
                matches = pattern.finditer(_SPLICE.sub(b"", text))
                definitions[name] += [(os.fsdecode(m[1] or b""), os.fsdecode(m[2]).strip()) for m in matches]
    return definitions


def _is_any_defined(names: Iterable[str], texts: Iterable[bytes]) -> bool:
    """Return whether a text defines a macro with one of these names."""
    choice = "|".join(sorted(names)).encode()
    pattern = re.compile(_HASH + rb"define" + _GAP + rb"(?:" + choice + rb")\b")
    return bool(choice) and any(map(pattern.search, texts))


def _macro_names(macro: str, definitions: Mapping[str, list[tuple[str, str]]]) -> list[tuple[str, bool]]:
    """Return (name, is quoted) for each value of a macro in an #include, or [] if a value is not a file name.

    The value of a macro whose body contains ``#`` or ``##`` is unknown.
    """
    match = _MACRO.fullmatch(macro)
    names: list[tuple[str, bool]] = []
    argument = (match["argument"] or "").strip() if match else ""
    for parameter, body in definitions[_name(macro)] if match else ():
        if parameter:
            body = re.sub(rf"\b{parameter}\b", lambda _: argument, body)
        value = None if "#" in body else _BODY.match(body)
        if value is None:
            return []
        names.append((value["angle"] or value["quoted"], value["angle"] is None))
    return names
