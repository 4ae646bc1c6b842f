"""What the notebook delivered under which name, without keeping it alive.

A rank that deletes its last name for a value lets go of it: an array's memory goes back at that moment, that
of anything else when the cell ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

MISSING: Any = object()
"""Nothing was delivered under the name, or it is gone."""


class Delivered:
    """Delivered values by name."""

    def __init__(self) -> None:
        self._weak: dict[str, weakref.ref[Any]] = {}
        self._strong: dict[str, Any] = {}
        """What takes no weak reference: numbers, strings, lists, dictionaries …"""

    def __contains__(self, name: object) -> bool:
        return name in self._weak or name in self._strong

    def get(self, name: str) -> Any:
        """Return the value, or `MISSING`."""
        reference = self._weak.get(name)
        if reference is None:
            return self._strong.get(name, MISSING)
        value = reference()
        return MISSING if value is None else value

    def update(self, values: Mapping[str, Any]) -> None:
        """Note what was delivered."""
        for name, value in values.items():
            self.discard(name)
            try:
                self._weak[name] = weakref.ref(value)
            except TypeError:
                self._strong[name] = value

    def discard(self, name: str) -> None:
        """Forget a name."""
        self._weak.pop(name, None)
        self._strong.pop(name, None)

    def let_go(self, namespace: Mapping[str, Any]) -> None:
        """Forget the names that are not bound to their values any more.

        Should the rank bind one to the very same object again, it counts as the rank's own from then on.
        """
        for name, value in list(self._strong.items()):
            if namespace.get(name, MISSING) is not value:
                del self._strong[name]
        for name, reference in list(self._weak.items()):
            if reference() is None:
                del self._weak[name]
