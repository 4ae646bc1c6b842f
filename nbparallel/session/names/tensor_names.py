"""Moves the memory of a notebook's tensors and modules into shared memory, in place."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

from nbparallel.errors import NotAnArrayError
from nbparallel.session.names.share_arrays import is_array
from nbparallel.sharing import Store
from nbparallel.sharing.shared_tensors import check_movable, move_tensors, tensors_in
from nbparallel.sharing.tensor_storage import is_dense
from nbparallel.sharing.tensors import is_tensor
from nbparallel.wire.units import size_text


def share_tensors_of(names: Sequence[str], namespace: MutableMapping[str, Any], store: Store) -> list[str]:
    """Move the tensors and modules of some names into shared memory that ranks may write.

    Other names of the notebook for tensors over the same memory move with them.

    Returns
    -------
    list of str
        Lines for the user about what still views the old memory.

    Raises
    ------
    NotAnArrayError
        A tensor cannot lie in shared memory; nothing has changed.
    """
    owners: dict[int, str] = {}
    tensors: dict[int, Any] = {}
    before: dict[int, tuple[int, int]] = {}
    for name in names:
        for tensor in tensors_in(namespace[name]):
            try:
                check_movable(tensor)
            except NotAnArrayError as error:
                raise NotAnArrayError(f"{name!r} cannot be shared: {error}") from error.__cause__
            owners.setdefault(tensor.untyped_storage()._cdata, name)
            tensors[id(tensor)] = tensor
            before[id(tensor)] = _address(tensor)
    for value in list(namespace.values()):
        if is_tensor(value) and is_dense(value) and value.untyped_storage()._cdata in owners:
            tensors[id(value)] = value
    names_of = {identity: owners.get(t.untyped_storage()._cdata, "") for identity, t in tensors.items()}
    _, left = move_tensors(tensors.values(), store)
    held: dict[str, int] = {}
    for tensor, nbytes in left:
        held[names_of[id(tensor)]] = held.get(names_of[id(tensor)], 0) + nbytes
    notes = [
        f"{name} moved into shared memory, and a list, a view or another object still has the old memory "
        f"({size_text(nbytes)}): what you change in one is not seen in the other"
        for name, nbytes in held.items()
    ]
    moved = [(*place, names_of[i]) for i, place in before.items() if _address(tensors[i]) != place]
    return notes + [
        f"{array} is an array over the old memory of {name}: what you change in one is not seen in the other"
        for array, value in list(namespace.items())
        if is_array(value)
        for name in sorted({name for start, stop, name in moved if start <= value.ctypes.data < stop})
    ]


def _address(tensor: Any) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
