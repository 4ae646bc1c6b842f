"""Which variables of the notebook may be shared for writing, and what stands in the way of the others."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import numpy as np

from nbparallel.errors import ObjectArrayError, ReadOnlyArrayError, UnknownNameError
from nbparallel.session.names.free_names import is_ipythons
from nbparallel.session.names.share_arrays import AnyArray, is_array


def check_shareable(name: str, namespace: Mapping[str, Any]) -> None:
    """Return if ranks can be let write the array of this name.

    Raises
    ------
    UnknownNameError
        The notebook has no such name.
    ObjectArrayError
        It is no array, or one of Python objects.
    ReadOnlyArrayError
        The notebook itself may not write it.
    """
    if name not in namespace or is_ipythons(name):
        near = difflib.get_close_matches(name, [key for key in namespace if not is_ipythons(key)], 3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise UnknownNameError(f"the notebook has no variable {name!r}{hint}")
    value = namespace[name]
    if type(value) is not np.ndarray:
        kind = type(value).__qualname__
        raise ObjectArrayError(
            f"{name!r} is of type {kind}; only numpy arrays lie in shared memory: `{name} = np.array({name})`"
        )
    if not is_array(value):
        raise ObjectArrayError(
            f"{name!r} is an array of dtype {value.dtype}: Python objects, whose memory cannot be shared; "
            f'convert it (`{name} = {name}.astype(float)`, or "U" for text), or let it be copied'
        )
    if not value.flags.writeable:
        if _only_flagged(value):
            what, way = "is flagged read-only", f"`{name}.flags.writeable = True`"
        else:
            what, way = "lies in memory for reading only", 'nbp.from_file(path, mode="r+") if it is a file'
        raise ReadOnlyArrayError(
            f"{name!r} {what} in the notebook, so ranks cannot be let write it: "
            f"{way}, or `{name} = {name}.copy()`, first"
        )


def _only_flagged(x: AnyArray) -> bool:
    """Return whether numpy would let the flag be taken away."""
    try:
        x.flags.writeable = True
    except ValueError:
        return False
    x.flags.writeable = False
    return True
