"""Storages: the memory under torch's tensors, as bytes for numpy, and where it lies in shared memory.

All tensors that view one memory refer to one storage, which torch keeps as one Python object as long as any
of them lives.  torch is never imported here before the user has imported it.

Note [torch's own shared memory]
--------------------------------
``share_memory_()`` puts a storage into a file in memory that torch has mapped.  It becomes one of our
segments by its descriptor, as a user's file does in `arrays`: the same pages, mapped once more.  The
storage itself is not touched: so nothing that views it, in Python or in C++, is left on other memory.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from nbparallel.errors import NotAnArrayError, with_article
from nbparallel.sharing.lifecycle.segment import Location
from nbparallel.sharing.memory.mapping import Access, Root, mapped_place
from nbparallel.sharing.store import Store
from nbparallel.sharing.strategies.strategy import SegmentSource
from nbparallel.sharing.tensors import array_at, array_of, is_module, is_tensor
from nbparallel.wire.units import size_text

if TYPE_CHECKING:
    import torch

MAPPED_FILES = "mmap"
"""Strategy of segments that are files which something else has made."""
OURS = "_nbparallel_shared"
"""Attribute of a storage that was made over shared memory: its bytes.  A copy of the storage lacks it."""


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a view, with strides, of memory on the CPU."""
    torch = sys.modules["torch"]
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and not tensor.is_quantized
        and not tensor.is_nested
        and bool(torch._C._has_storage(tensor))
        # a lazy module's parameter, before the first batch
        and (type(tensor) in (torch.Tensor, torch.nn.Parameter) or not hasattr(tensor, "materialize"))
    )


def storage_bytes(storage: torch.UntypedStorage) -> Root:
    """Return the memory of a storage on the CPU as an array of bytes, which keeps the storage."""
    nbytes = storage.nbytes()
    return array_at(storage, storage.data_ptr(), (nbytes,)) if nbytes else np.empty(0, np.uint8)


def shared_storage(array: Root) -> torch.UntypedStorage:
    """Return the storage over an array of bytes in shared memory: which torch calls shared as well."""
    import torch

    storage = torch.from_numpy(array).untyped_storage()
    # On this one object: torch itself would report it as not shared, and move it into memory of its own,
    # so that other processes would keep the old one.  A copy of the storage is an ordinary one.
    reference = weakref.ref(storage)
    storage.is_shared = lambda: True
    storage.share_memory_ = reference
    copies: list[Any] = []
    """One as long as the storage lives: torch finds by its file what it has sent before."""

    def sent() -> Any:
        """Return what torch.multiprocessing sends: a copy.

        torch would move the storage into memory of its own, and ranks would go on with the old one.
        """
        ours: Any = reference()  # lives: torch calls this as its method
        copies[:] = [copies[0].copy_(ours) if copies else ours.clone()]
        warnings.warn(
            f"a tensor in memory that ranks share ({size_text(ours.nbytes())}) goes to another process by "
            "torch.multiprocessing as a copy: what is written to one is not seen in the other",
            RuntimeWarning,
            stacklevel=2,
        )
        return copies[0]

    storage._share_fd_cpu_ = lambda: sent()._share_fd_cpu_()
    storage._share_filename_cpu_ = lambda: sent()._share_filename_cpu_()
    storage._shared_incref = lambda: [copy._shared_incref() for copy in copies]
    setattr(storage, OURS, array)
    return storage


def private_storage(buffer: Any) -> torch.UntypedStorage:
    """Return the storage over a writable buffer that belongs to this process."""
    import torch

    if not len(buffer):
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def locate_tensor(tensor: torch.Tensor, store: Store) -> Location | None:
    """Return where a dense tensor's elements lie in shared memory that is known already, else None."""
    storage = tensor.untyped_storage()
    if not is_dense(tensor) or not storage.nbytes():
        return None
    known = _adopted.get(store, {}).get(storage.data_ptr())
    whole = storage_bytes(storage) if known is None else known[1]
    first = tensor.storage_offset() * tensor.itemsize
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    last = first + sum((n - 1) * step for n, step in steps) * tensor.itemsize + tensor.itemsize
    return store.location(whole[first:last] if tensor.numel() else whole[first:first])


def find_shared(storage: torch.UntypedStorage, store: Store, content: Root | None = None) -> Root | None:
    """Return the bytes of a storage in memory that every process may write, else None.

    Memory that torch itself has shared becomes a segment of this process.  `content`: its bytes, if the
    caller has them.
    """
    ours: Root | None = storage.__dict__.get(OURS)
    if ours is not None:
        return ours if ours.nbytes else None
    if not storage.nbytes():
        return None
    found = storage_bytes(storage) if content is None else content
    place = store.location(found)
    if place is not None:
        return found if place.writable and place.for_all else None
    return _adopt(storage, store) if storage.is_shared() else None


_adopted: weakref.WeakKeyDictionary[Store, dict[int, tuple[weakref.ref[Any], Root]]] = (
    weakref.WeakKeyDictionary()
)
"""By store and address: the storages that torch has shared, and their memory as a segment."""


def _adopt(storage: torch.UntypedStorage, store: Store) -> Root | None:
    known = _adopted.setdefault(store, {})
    address = storage.data_ptr()
    entry = known.get(address)
    if entry is not None and entry[0]() is storage:
        return entry[1]
    opened = _open_memory(address)
    if opened is None:
        return None
    source, offset = opened
    try:
        root = store.adopt(source, Access.WRITE, for_all=True)
    except BaseException:
        source.close()
        raise

    def forget(reference: object) -> None:
        entry = known.get(address)
        if entry is not None and entry[0] is reference:
            del known[address]

    array = root[offset : offset + storage.nbytes()]
    known[address] = weakref.ref(storage, forget), array
    return array


def _open_memory(address: int) -> tuple[SegmentSource, int] | None:
    """Open the file that is mapped at an address; return it, and where in it the address lies.

    None if there is none that every process may write, or the system does not say.
    """
    place = mapped_place(address)
    if place is None or not place.shared or not place.writable:
        return None
    # by its name, or from one that is open
    deleted = place.path.endswith(" (deleted)")
    paths = [entry.path for entry in os.scandir("/proc/self/fd")] if deleted else [place.path]
    for path in paths:
        with contextlib.suppress(OSError):  # closed since, as the descriptor of the listing itself
            if os.stat(path).st_ino == place.inode:
                source = SegmentSource(os.open(path, os.O_RDWR | os.O_CLOEXEC), 0, MAPPED_FILES)
                status = os.fstat(source.fd)
                if status.st_ino == place.inode:  # its number may be another file's by now
                    source.nbytes = status.st_size
                    return source, place.offset
    return None


# Shared tensors: moves the memory of tensors and modules into shared memory, in place.
#
# Note [in place]
# ---------------
# An array cannot be given other memory, so `nbparallel.share` returns another array.  A tensor can, and keeps
# its identity: optimisers, modules and lists that hold it see the shared memory.  The old memory is copied,
# not moved, and torch frees it when nothing views it any more: what else viewed it (a view that was not given
# here, an array of numpy) stays valid, but does not see later writes.  `Tensor.share_memory_` of torch frees
# it while arrays of numpy still point there.


def holds_tensors(x: object) -> bool:
    """Return whether `x` is a tensor or a module of torch; False, at no cost, in a process without torch."""
    return is_tensor(x) or is_module(x)


def tensors_in(x: Any) -> list[torch.Tensor]:
    """Return a tensor itself, or the parameters and buffers of a module, each once."""
    return [x] if is_tensor(x) else [*x.parameters(), *x.buffers()]


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
) -> list[tuple[Any, int]]:
    """Move the memory of tensors into shared memory that every process may write.

    Those over one memory are moved together and go on sharing it.  Returns the first tensor of each memory
    that something else still views, and the bytes of that.

    Raises
    ------
    NotAnArrayError
        One of them cannot lie in shared memory; nothing has changed.
    """
    moves = _copies(tensors, store, strategy)
    for over_it, storage, _ in moves:
        for tensor in over_it:
            tensor.data = _view_like(tensor, storage)
    return [(over_it[0], storage.nbytes()) for over_it, storage, old in moves if old() is not None]


def _copies(
    tensors: Iterable[Any], store: Store, strategy: str | None
) -> list[tuple[list[Any], Any, weakref.ref[Any]]]:
    """Return for each private memory its tensors, its copy in shared memory, and whether it still lives."""
    memories: dict[int, tuple[Any, list[Any]]] = {}
    for tensor in tensors:
        check_movable(tensor)
        storage = tensor.untyped_storage()
        viewers = memories.setdefault(storage._cdata, (storage, []))[1]
        # what it is a view of keeps the memory, and is often not the user's: `torch.arange(6).reshape(2, 3)`
        for viewer in (tensor, tensor._base):
            if viewer is not None and not any(viewer is other for other in viewers):
                viewers.append(viewer)
    copies = [
        (viewers, _shared_copy(storage, store, strategy), weakref.ref(storage))
        for storage, viewers in memories.values()
    ]
    return [copy for copy in copies if copy[1] is not None]


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
    if left := move_tensors(tensors_in(x), store, strategy=strategy):
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
