"""Replace attributes of other libraries, and put them back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

#: Packages whose modules keep their own names.
_LIBRARIES = frozenset(("cuda", "cupy", "cupy_backends", "cudatma", "triton", "torch", "numpy", "sys"))


class Patches:
    """Attributes that were replaced, and their previous values."""

    def __init__(self) -> None:
        self._previous: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Replace an attribute of a module, class or object, and return its previous value."""
        previous = getattr(owner, name)
        self._previous.append((owner, name, previous))
        setattr(owner, name, value)
        return previous

    def set_everywhere(
        self, module: ModuleType, values: Mapping[str, Any], convert: Callable[[Any], Any] | None = None
    ) -> None:
        """Replace attributes of a library's module, also where the program's modules have imported them by name.

        ``convert`` returns the replacement for any other object in a variable of the program's modules, or None.
        """
        known = {name: value for name, value in values.items() if hasattr(module, name)}
        replaced = {id(self.set(module, name, value)): value for name, value in known.items()}
        for other in list(sys.modules.values()):
            if not isinstance(other, ModuleType) or other.__name__.partition(".")[0] in _LIBRARIES:
                continue
            for name, value in list(vars(other).items()):
                new = replaced.get(id(value)) or (convert(value) if convert is not None else None)
                if new is not None:
                    self.set(other, name, new)

    def undo(self) -> None:
        """Put back the previous values, the last one first."""
        while self._previous:
            setattr(*self._previous.pop())
