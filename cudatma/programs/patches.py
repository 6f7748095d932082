"""Replace attributes of other libraries, and put them back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from types import ModuleType
from typing import Any

#: Packages that are not the program: their modules keep their own names, and their calls are not the program's.
LIBRARIES = frozenset(("cuda", "cudatma", "cupy", "cupy_backends", "cutlass", "numpy", "sys", "torch", "triton"))


class Patches(ExitStack):
    """Attributes that are replaced until the block ends, and other changes that its end undoes."""

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Replace an attribute of a module, class or object, and return its previous value."""
        previous = getattr(owner, name)
        setattr(owner, name, value)
        self.callback(setattr, owner, name, previous)
        return previous

    def set_everywhere(
        self, module: ModuleType, values: Mapping[str, Any], convert: Callable[[Any], Any] | None = None
    ) -> None:
        """Replace attributes of a library's module, also where the program's modules have imported them by name.

        ``convert`` returns the replacement for any other object in a variable of the program's modules, or None. At the
        end, the originals also return to modules that imported a replacement in the block.
        """
        names = [name for name in values if hasattr(module, name)]
        # Each pair is an original and its replacement.
        pairs = [(self.set(module, name, values[name]), values[name]) for name in names]
        by_original = {id(original): new for original, new in pairs}

        def replacement(value: Any) -> Any:
            new = by_original.get(id(value))
            if new is None and convert is not None:
                new = convert(value)
                if new is not None:
                    pairs.append((value, new))
            return new

        modules = _modules_of_program()
        _replace(modules, replacement)

        def put_back() -> None:
            by_replacement = {id(new): original for original, new in pairs}
            _replace([*modules, *_modules_of_program()], lambda value: by_replacement.get(id(value)))

        self.callback(put_back)


def _modules_of_program() -> list[ModuleType]:
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    return [module for module in modules if module.__name__.partition(".")[0] not in LIBRARIES]


def _replace(modules: Iterable[ModuleType], replacement: Callable[[Any], Any]) -> None:
    for module in modules:
        for name, value in list(vars(module).items()):
            new = replacement(value)
            if new is not None:
                setattr(module, name, new)
