"""Replace functions and classes of a library for a time, also where a program has imported them by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

#: Packages whose modules keep their own names.
_LIBRARIES = frozenset(("cuda", "cupy", "cupy_backends", "cudatma", "triton", "torch", "numpy", "sys"))


class Replacements:
    """Attributes of modules and classes that are replaced until ``undo``."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Replace an attribute and return its old value."""
        old = vars(owner)[name] if name in vars(owner) else getattr(owner, name)
        setattr(owner, name, value)
        self._undo.append((owner, name, old))
        return old

    def set_all(self, module: ModuleType, values: Mapping[str, Any], convert: Callable[[Any], Any] | None = None) -> None:
        """Replace attributes of a library's module, and the same objects in the program's modules.

        ``convert`` returns the replacement for another object in a variable of the program's modules, or None.
        """
        replaced = {id(self.set(module, name, value)): value for name, value in values.items() if hasattr(module, name)}
        for other in list(sys.modules.values()):
            if not isinstance(other, ModuleType) or other.__name__.partition(".")[0] in _LIBRARIES:
                continue
            for name, value in list(vars(other).items()):
                new = replaced.get(id(value)) or (convert(value) if convert is not None else None)
                if new is not None and new is not value:
                    self.set(other, name, new)

    def undo(self) -> None:
        """Restore everything, the last replacement first."""
        while self._undo:
            owner, name, old = self._undo.pop()
            setattr(owner, name, old)
