"""Replace attributes of other libraries, and put them back."""

from __future__ import annotations

from typing import Any


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

    def undo(self) -> None:
        """Put back the previous values, the last one first."""
        while self._previous:
            setattr(*self._previous.pop())
