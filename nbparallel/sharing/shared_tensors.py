"""Shared tensors: moves the memory of tensors and modules into shared memory, in place.

Note [in place]
---------------
An array cannot be given other memory, so `nbparallel.share` returns another array.  A tensor can, and keeps
its identity: optimisers, modules and lists that hold it see the shared memory.  The old memory is copied, not
moved, and torch frees it when nothing views it any more: what else viewed it (a view that was not given here,
an array of numpy) stays valid, but does not see later writes.  `Tensor.share_memory_` of torch frees it while
arrays of numpy still point there.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from nbparallel.errors import NotAnArrayError
from nbparallel.sharing.store import Store
from nbparallel.sharing.tensor_storage import find_shared, shared_storage, storage_bytes

if TYPE_CHECKING:
    import torch

Tensors: TypeAlias = "torch.Tensor | torch.nn.Module"
"""What holds tensors."""


def holds_tensors(x: object) -> bool:
    """Return whether `x` is a tensor or a module of torch; False, at no cost, in a process without torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, (torch.Tensor, torch.nn.Module))


def tensors_in(x: Any) -> list[torch.Tensor]:
    """Return a tensor itself, or the parameters and buffers of a module, each once."""
    import torch

    return [x] if isinstance(x, torch.Tensor) else [*x.parameters(), *x.buffers()]


@dataclass(slots=True)
class _Memory:
    """A storage and the tensors over it that are to be moved."""

    storage: Any
    tensors: list[Any] = field(default_factory=list)


def are_shared(x: Any, store: Store) -> bool:
    """Return whether every tensor in `x` lies in memory that all processes of a session may write."""
    found = tensors_in(x)
    return bool(found) and all(
        _is_dense(tensor) and (not tensor.numel() or find_shared(tensor.untyped_storage(), store) is not None)
        for tensor in found
    )


def move_tensors(
    tensors: Iterable[Any], store: Store, *, strategy: str | None = None
) -> tuple[int, list[tuple[Any, int]]]:
    """Move the memory of tensors into shared memory that every process may write.

    Those over one memory are moved together and go on sharing it.

    Returns
    -------
    copied : int
        Bytes.
    left : list of (tensor, bytes)
        The first tensor of each memory that something else still views.

    Raises
    ------
    NotAnArrayError
        One of them cannot lie in shared memory; nothing has changed.
    """
    memories: dict[int, _Memory] = {}
    for tensor in tensors:
        check_dense(tensor)
        storage = tensor.untyped_storage()
        memory = memories.setdefault(storage._cdata, _Memory(storage))
        if not any(tensor is other for other in memory.tensors):
            memory.tensors.append(tensor)
    private = [memory for memory in memories.values() if memory.storage.nbytes()]
    moves = []
    for memory in private:
        if find_shared(memory.storage, store) is None:
            content = storage_bytes(memory.storage)
            array = store.share(content, strategy=strategy, for_all=True)
            store.allow_write(array)
            if array is not content:
                moves.append((memory, shared_storage(array)))
    copied, watched = 0, []
    for memory, storage in moves:
        for tensor in memory.tensors:
            tensor.data = _view_like(tensor, storage)
        copied += storage.nbytes()
        watched.append((memory.tensors[0], storage.nbytes(), weakref.ref(memory.storage)))
    del memories, private, moves
    for tensor_, nbytes, old in watched:
        pass
    return copied, [(tensor, nbytes) for tensor, nbytes, old in watched if old() is not None]


def share_tensors(x: Any, store: Store, *, strategy: str | None = None) -> Any:
    """Move a tensor or a module into shared memory and return it; warn if something else holds old memory."""
    copied, left = move_tensors(tensors_in(x), store, strategy=strategy)
    if left:
        warnings.warn(
            f"{_shown(left)} moved into shared memory, but something else (a view, a tensor that is tied to "
            "it) still holds the old memory: writes to one are not seen in the other",
            RuntimeWarning,
            stacklevel=3,
        )
    return x
