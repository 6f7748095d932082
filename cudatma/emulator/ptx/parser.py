"""Parser that converts PTX text to a Module.

Source: PTX ISA 9.0, "Syntax", "Directives", "Abstracting the ABI".
"""

from __future__ import annotations

import gc
import re

from cudatma.emulator.errors import PtxError
from cudatma.emulator.ptx.body import BodyParser
from cudatma.emulator.ptx.declarations import read_variable
from cudatma.emulator.ptx.lexer import Cursor
from cudatma.emulator.ptx.model import Function, Module, Variable

_TARGET = re.compile(r"sm_\d{2,3}[af]?")
_LINKAGE = {"visible", "extern", "weak", "common"}
_SPACES = {"global", "const", "shared"}
_TRIPLES = {"maxntid", "reqntid", "reqnctapercluster", "minnctapersm", "maxnctapersm", "maxnreg", "maxclusterrank"}
#: Maximum number of parameters. This many one-byte parameters fill the largest parameter space. Real kernels have at
#: most about a hundred.
_MAX_PARAMS = 4096
#: Matches inline assembly, and a .loc directive in it.
_INLINE_ASM = re.compile(r"// begin inline asm\n.*?// end inline asm", re.DOTALL)
_LOC_LINE = re.compile(r"^[ \t]*\.loc\b.*", re.MULTILINE)
#: Matches a section with debug information, which has more tokens than the code.
_DEBUG_SECTION = re.compile(r"^[ \t]*\.section[ \t]+\.debug_\w+\s*\{[^{}]*\}", re.MULTILINE)
_FLAGS = {"explicitcluster", "blocksareclusters", "noreturn", "unified"}


def parse(text: str) -> Module:
    """Parse a PTX module from NVRTC or nvcc (PTX 7.x to 9.x).

    Raise PtxError with the line number if the text is malformed. Unknown instructions are reported when a kernel that
    contains them is prepared.
    """
    if not isinstance(text, str):
        raise PtxError(f"the PTX text must be a str, got {type(text).__name__}")
    # Parsing creates many objects but no cycles. Garbage collection would take a quarter of the parsing time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        code = _DEBUG_SECTION.sub(lambda section: "\n" * section[0].count("\n"), text)
        return _ModuleParser(_INLINE_ASM.sub(_without_locs, code)).read()
    except RecursionError:
        raise PtxError("scopes are nested too deeply") from None
    finally:
        if was_enabled:
            gc.enable()


def _without_locs(assembly: re.Match[str]) -> str:
    """Return inline assembly without .loc directives, whose line numbers LLVM offsets by the line in the assembly."""
    return _LOC_LINE.sub("", assembly[0])


class _ModuleParser:
    def __init__(self, text: str) -> None:
        self.cursor = Cursor(text)
        self.module = Module()

    def read(self) -> Module:
        while self.cursor.token.kind != "end":
            self._statement()
        if self.module.version == (0, 0):
            raise PtxError("the text is not PTX because it has no .version directive")
        if not self.module.target:
            raise PtxError("the PTX has no .target directive")
        return self.module

    def _statement(self) -> None:
        cursor = self.cursor
        if cursor.accept(";"):
            return
        is_extern = False
        token = cursor.expect_kind("directive")
        while token.text[1:] in _LINKAGE:
            is_extern |= token.text == ".extern"
            token = cursor.expect_kind("directive")
        name = token.text[1:]
        if name == "version":
            number = cursor.expect_kind("number")
            major, _, minor = number.text.partition(".")
            if not major.isdecimal() or not (minor or "0").isdecimal() or len(number.text) > 8:
                raise PtxError(f"`.version` must be a version such as 8.6, got `{number.text[:20]}`", number.line)
            self.module.version = (int(major), int(minor or 0))
        elif name == "target":
            self.module.target = cursor.expect_kind("word").text
            if not _TARGET.fullmatch(self.module.target):
                raise cursor.error(f"`.target` must be an architecture such as sm_90a, got `{self.module.target[:40]}`")
            while cursor.accept(","):
                cursor.expect_kind("word")
        elif name == "address_size":
            if cursor.integer() != 64:
                raise cursor.error("`.address_size` must be 64")
        elif name == "file":
            self._file()
        elif name == "section":
            while cursor.token.text != "{":
                cursor.next()
            cursor.skip_braces()
        elif name in ("pragma", "alias"):
            cursor.skip_statement()
        elif name in _SPACES:
            for variable in read_variable(cursor, name, is_extern):
                self.module.variables[variable.name] = variable
            cursor.expect(";")
        elif name in ("entry", "func"):
            self._function(name == "entry")
        else:
            raise PtxError(f"directive `.{name}` is not supported", token.line)

    def _file(self) -> None:
        number = self.cursor.integer()
        self.module.files[number] = self.cursor.expect_kind("string").text[1:-1]
        while self.cursor.accept(","):
            self.cursor.integer()

    def _function(self, is_entry: bool) -> None:
        cursor = self.cursor
        returns: list[Variable] = []
        if cursor.token.kind == "directive":
            cursor.next()  # Skip .noreturn before the name.
        if cursor.token.text == "(":
            returns = self._params()
        function = Function(cursor.expect_kind("word").text, is_entry, returns=returns)
        if cursor.token.text == "(":
            function.params = self._params()
        while cursor.token.kind == "directive":
            self._function_directive(function)
        if cursor.accept(";"):
            function.is_defined = False
            self.module.functions.setdefault(function.name, function)
            return
        known = self.module.functions.get(function.name)
        if known is not None and known.is_defined:
            raise cursor.error(f"function `{function.name}` is defined twice")
        BodyParser(cursor, function, self.module).read()
        self.module.functions[function.name] = function

    def _function_directive(self, function: Function) -> None:
        cursor = self.cursor
        token = cursor.next()
        name = token.text[1:]
        if name in _TRIPLES:
            values = [cursor.integer()]
            while cursor.accept(","):
                values.append(cursor.integer())
            function.directives[name] = tuple(values)
        elif name in _FLAGS:
            function.directives[name] = ()
        elif name == "pragma":
            cursor.skip_statement()
        elif name == "abi_preserve" or name == "abi_preserve_control":
            cursor.integer()
        else:
            raise PtxError(f"function directive `.{name}` is not supported", token.line)

    def _params(self) -> list[Variable]:
        cursor = self.cursor
        cursor.expect("(")
        params: list[Variable] = []
        names: set[str] = set()
        while not cursor.accept(")"):
            if not cursor.accept(".param"):
                raise cursor.error("parameters in .reg space are not supported")
            for param in read_variable(cursor, "param"):
                if param.name in names:
                    raise cursor.error(f"parameter `{param.name}` is declared twice")
                names.add(param.name)
                params.append(param)
            if len(params) > _MAX_PARAMS:
                raise cursor.error(f"a function must have at most {_MAX_PARAMS} parameters")
            cursor.accept(",")
        return params
