"""Replace attributes of other libraries, and restore them later."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import compress
from types import CellType, ModuleType
from typing import Any

#: Packages that are not part of the program. Their variables are not replaced, and calling_place() skips their frames.
LIBRARIES = frozenset(
    ("contextlib", "cuda", "cudatma", "cupy", "cupy_backends", "cutlass", "numpy", "sys", "torch", "triton")
)


class Patches(ExitStack):
    """Context manager that replaces attributes and restores them at the end of the block."""

    def __init__(self) -> None:
        super().__init__()
        #: Originals and replacements of set_everywhere() for the next call of replace_variables().
        self._pairs: list[tuple[Any, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Replace an attribute of a module, class or object, and return its previous value."""
        previous = original = getattr(owner, name)
        is_inherited = isinstance(owner, type) and name not in vars(owner)
        if isinstance(owner, type) and not is_inherited:
            original = vars(owner)[name]  # getattr() unwraps a static method
        setattr(owner, name, value)
        if is_inherited:
            self.callback(delattr, owner, name)
        else:
            self.callback(setattr, owner, name, original)
        return previous

    def set_everywhere(self, module: ModuleType, values: Mapping[str, Any]) -> None:
        """Replace attributes of a library's module.

        replace_variables() then replaces the program's module variables that have the same values.
        """
        names = [name for name in values if hasattr(module, name)]
        self._pairs += [(self.set(module, name, values[name]), values[name]) for name in names]

    def replace_variables(self) -> None:
        """Replace the program's variables for all calls of set_everywhere() since the last call of this method."""
        pairs, self._pairs = self._pairs, []
        if pairs:
            by_original = {id(original): new for original, new in pairs}
            by_replacement = {id(new): original for original, new in pairs}
            modules = _modules_of_program()
            _replace(modules, by_original)
            self.callback(lambda: _replace(modules | _modules_of_program(), by_replacement))

    def set_objects(self, convert: Mapping[type, Callable[[Any], Any]]) -> None:
        """Replace all existing objects of the given types. ``convert`` maps each type to a conversion function.

        The method updates references in module variables, attributes, dicts, lists and closures, but not in local
        variables and tuples.
        """
        kinds = {id(kind): function for kind, function in convert.items()}
        with _unfrozen():
            objects = gc.get_objects()
            # There can be millions of objects. These iterators take half as long as a comprehension.
            originals = list(compress(objects, map(kinds.__contains__, map(id, map(type, objects)))))
            del objects
        if originals:
            replacements = [kinds[id(type(value))](value) for value in originals]
            _swap(originals, replacements)
            self.callback(_swap, replacements, originals)


def _modules_of_program() -> set[ModuleType]:
    named = list(sys.modules.items())
    modules = [module for name, module in named if name.partition(".")[0] not in LIBRARIES]
    return {module for module in modules if isinstance(module, ModuleType)}


def _replace(modules: Iterable[ModuleType], replacements: Mapping[int, Any]) -> None:
    for module in modules:
        # There can be millions of variables, so skip modules that contain none of the objects.
        if replacements.keys().isdisjoint(map(id, list(vars(module).values()))):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in replacements:
                setattr(module, name, replacements[id(value)])


@contextmanager
def _unfrozen() -> Iterator[None]:
    """Include frozen objects in the results of gc functions within the block."""
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    try:
        yield
    finally:
        if is_frozen:
            gc.freeze()


def _swap(old: list[Any], new: list[Any]) -> None:
    """Replace objects in the dicts, lists, cells and attributes that refer to them."""
    by_old = {id(value): other for value, other in zip(old, new, strict=True)}
    own = {id(old), id(new), *map(id, new), *(id(getattr(value, "__dict__", value)) for value in new)}
    with _unfrozen():
        holders = gc.get_referrers(*old)
    for holder in holders:
        if id(holder) in own:
            continue
        space = getattr(holder, "__dict__", holder)
        if isinstance(space, dict):
            space.update({key: by_old[id(value)] for key, value in list(space.items()) if id(value) in by_old})
        elif isinstance(holder, list):
            holder[:] = [by_old.get(id(value), value) for value in holder]
        elif isinstance(holder, CellType) and id(holder.cell_contents) in by_old:
            holder.cell_contents = by_old[id(holder.cell_contents)]
