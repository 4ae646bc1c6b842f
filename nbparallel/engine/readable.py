"""Messages that the notebook can read: it has no class that was made on a rank.

Text and numbers of a user's own classes travel as what they are besides: plain text and numbers.  Anything
else of a class that is not ours could be read only where that class is.
"""

from __future__ import annotations

import io
import pickle
from types import FunctionType
from typing import Any

import numpy as np

from nbparallel.wire.inspection import Completions, Sighting
from nbparallel.wire.messages import Message

_OURS = "nbparallel."
_EVERYWHERE = frozenset({"builtins", "datetime"})
"""Modules whose classes every Python has."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        """Decide about what is not exactly one of Python's own plain kinds."""
        kind = obj if isinstance(obj, type) else type(obj)
        module = str(kind.__module__)
        if module.startswith(_OURS):
            return NotImplemented
        if kind is not obj:
            plain = _plain(obj)
            if plain is not None:
                return type(plain), (plain,)
        if module in _EVERYWHERE and not isinstance(obj, FunctionType):
            return NotImplemented
        raise TypeError(
            f"an object of class {kind.__name__} cannot be shown in the notebook: what a display is made of "
            "(_repr_mimebundle_, display(…, raw=True)) has to be text, bytes, numbers, lists and dicts"
        )


def _plain(obj: Any) -> Any:
    """Return the value of an object of a class that someone derived from a plain one; else None."""
    if isinstance(obj, str):
        return str.__str__(obj)  # `str(obj)` may be another one of that class
    if isinstance(obj, bytes):
        return bytes(memoryview(obj))
    if isinstance(obj, int):
        return int.__int__(obj)
    if isinstance(obj, float):
        return float.__float__(obj)
    if isinstance(obj, dict):
        return dict(dict.items(obj))
    if isinstance(obj, list):
        return list(list.__iter__(obj))
    if isinstance(obj, tuple):
        return tuple(tuple.__iter__(obj))
    return obj.item() if isinstance(obj, np.bool_ | np.integer | np.floating) else None


def packed(message: Message | Sighting | Completions) -> bytes:
    """Return the bytes of a message to the notebook.

    Raises
    ------
    TypeError
        There is something in it that the notebook could not read.
    """
    stream = io.BytesIO()
    _Pickler(stream, 5).dump(message)
    return stream.getvalue()
