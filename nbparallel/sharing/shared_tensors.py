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
from typing import TYPE_CHECKING, Any

from nbparallel.errors import NotAnArrayError, with_article
from nbparallel.sharing.store import Store
from nbparallel.sharing.tensor_storage import find_shared, is_dense, shared_storage, storage_bytes
from nbparallel.sharing.tensors import array_of, is_tensor
from nbparallel.wire.units import size_text

if TYPE_CHECKING:
    import torch


def holds_tensors(x: object) -> bool:
    """Return whether `x` is a tensor or a module of torch; False, at no cost, in a process without torch."""
    if is_tensor(x):
        return True
    nn = sys.modules.get("torch.nn")
    kind = getattr(nn, "Module", None)  # a module that is being imported may lack it
    return kind is not None and isinstance(x, kind)


def tensors_in(x: Any) -> list[torch.Tensor]:
    """Return a tensor itself, or the parameters and buffers of a module, each once."""
    return [x] if is_tensor(x) else [*x.parameters(), *x.buffers()]


@dataclass(slots=True)
class _Memory:
    """A storage and the tensors over it that are to be moved."""

    storage: Any
    tensors: list[Any] = field(default_factory=list)


def are_shared(x: Any, store: Store) -> bool:
    """Return whether a tensor, or every tensor of a module, lies in shared memory."""
    return all(is_dense(tensor) and _is_shared(tensor.untyped_storage(), store) for tensor in tensors_in(x))


def are_writable(x: Any, store: Store) -> bool:
    """Return whether every process may write a tensor, or every tensor of a module, in shared memory."""
    return all(
        is_dense(tensor) and (not tensor.numel() or find_shared(tensor.untyped_storage(), store) is not None)
        for tensor in tensors_in(x)
    )


def _is_shared(storage: Any, store: Store) -> bool:
    return not storage.nbytes() or store.is_shared(storage_bytes(storage)) or bool(storage.is_shared())


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
    moves = _copies(_memories(tensors), store, strategy)
    for over_it, storage, _ in moves:
        for tensor in over_it:
            tensor.data = _view_like(tensor, storage)
    left = [(over_it[0], storage.nbytes()) for over_it, storage, old in moves if old() is not None]
    return sum(storage.nbytes() for _, storage, _ in moves), left


def _memories(tensors: Iterable[Any]) -> list[_Memory]:
    found: dict[int, _Memory] = {}
    for tensor in tensors:
        check_movable(tensor)
        storage = tensor.untyped_storage()
        memory = found.setdefault(storage._cdata, _Memory(storage))
        # what it is a view of keeps the memory, and is often not the user's: `torch.arange(6).reshape(2, 3)`
        for viewer in (tensor, tensor._base):
            if viewer is not None and not any(viewer is other for other in memory.tensors):
                memory.tensors.append(viewer)
    return list(found.values())


def _copies(
    memories: Iterable[_Memory], store: Store, strategy: str | None
) -> list[tuple[list[Any], Any, weakref.ref[Any]]]:
    """Return for each private memory its tensors, its copy in shared memory, and whether it still lives."""
    copies = []
    for memory in memories:
        storage = _shared_copy(memory.storage, store, strategy)
        if storage is not None:
            copies.append((memory.tensors, storage, weakref.ref(memory.storage)))
    return copies


def check_movable(tensor: Any) -> None:
    """Check that a tensor can be given memory that is shared.

    Raises
    ------
    NotAnArrayError
        It has none of its own, or torch would not let it have another.
    """
    if hasattr(tensor, "materialize"):
        raise NotAnArrayError("a parameter of this module has no memory yet: pass a batch through it first")
    if not is_dense(tensor):
        try:
            array_of(tensor)
        except TypeError as error:
            raise NotAnArrayError(f"only dense tensors of the CPU lie in shared memory: {error}") from error
        raise NotAnArrayError(
            f"{with_article(type(tensor).__name__)} has no memory of its own: share what it consists of"
        )
    if tensor.is_inference():
        raise NotAnArrayError(
            "this tensor was made in torch.inference_mode(), and cannot be given other memory: share "
            "`x.clone()`, made outside"
        )


def _shared_copy(storage: Any, store: Store, strategy: str | None) -> Any:
    """Return a copy of a storage in shared memory; None if every process may write it where it is."""
    if not storage.nbytes() or find_shared(storage, store) is not None:
        return None
    content = storage_bytes(storage)
    array = store.share(content, strategy=strategy, for_all=True)
    store.allow_write(array)
    return None if array is content else shared_storage(array)


def _view_like(tensor: Any, storage: Any) -> Any:
    import torch

    view = torch.empty(0, dtype=tensor.dtype).set_(
        storage, tensor.storage_offset(), tensor.size(), tensor.stride()
    )
    torch._C._set_conj(view, tensor.is_conj())
    torch._C._set_neg(view, tensor.is_neg())
    return view


def share_tensors(x: Any, store: Store, *, strategy: str | None = None) -> Any:
    """Move a tensor or a module into shared memory and return it; warn if something else holds old memory."""
    _, left = move_tensors(tensors_in(x), store, strategy=strategy)
    if left:
        text = ", ".join(
            f"a tensor of shape {tuple(tensor.shape)} ({size_text(n)})" for tensor, n in left[:3]
        )
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        warnings.warn(
            f"{text}{more} moved into shared memory, but something else (a view, a tied tensor) "
            "still holds the old memory: writes to one are not seen in the other",
            RuntimeWarning,
            stacklevel=3,
        )
    return x
