"""Storages: the memory under torch's tensors, as bytes for numpy, and where it lies in shared memory.

All tensors that view one memory refer to one storage, which torch keeps as one Python object as long as any
of them lives.  torch is never imported here before the user has imported it.

Note [torch's own shared memory]
--------------------------------
``share_memory_()`` puts a storage into a file in memory that torch has mapped.  It becomes one of our
segments by its descriptor, as a user's file does in `file_arrays`: the same pages, mapped once more.  The
storage itself is not touched: so nothing that views it, in Python or in C++, is left on other memory.
"""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from nbparallel.sharing.lifecycle.segment import Location
from nbparallel.sharing.memory.file_mapping import mapped_place
from nbparallel.sharing.memory.mapping import Access, Root
from nbparallel.sharing.strategies.strategy import SegmentSource
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


class LocatingStore(Protocol):
    """What is needed of `Store`."""

    def location(self, x: object) -> Location | None:
        """Return segment and bytes of a shared array, None if it is not shared."""

    def adopt(self, source: SegmentSource, access: Access, *, for_all: bool) -> Root:
        """Return the root of memory that was made elsewhere."""


class _StorageBytes:
    """The bytes of a storage as numpy's array interface; keeps the storage."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self.__array_interface__ = {
            "data": (storage.data_ptr(), False),
            "shape": (storage.nbytes(),),
            "typestr": "|u1",
            "version": 3,
        }


def storage_bytes(storage: torch.UntypedStorage) -> Root:
    """Return the memory of a storage on the CPU as an array of bytes, which keeps the storage."""
    return np.asarray(_StorageBytes(storage)) if storage.nbytes() else np.empty(0, np.uint8)


def shared_storage(array: Root) -> torch.UntypedStorage:
    """Return the storage over an array of bytes in shared memory: which torch calls shared as well."""
    import torch

    storage = torch.from_numpy(array).untyped_storage()
    # On this one object: torch itself would report it as not shared, and move it into memory of its own,
    # so that other processes would keep the old one.  A copy of the storage is an ordinary one.
    reference = weakref.ref(storage)
    storage.is_shared = _always
    storage.share_memory_ = reference
    sent = _SentCopy(reference)
    storage._share_fd_cpu_ = sent.share_by_descriptor
    storage._share_filename_cpu_ = sent.share_by_name
    storage._shared_incref = sent.keep
    setattr(storage, OURS, array)
    return storage


class _SentCopy:
    """What torch.multiprocessing sends of a storage over our memory: a copy.

    torch would move the storage into memory of its own, and ranks would go on with the old one.

    Parameters
    ----------
    storage : weakref.ref of torch.UntypedStorage
        What is sent.
    """

    def __init__(self, storage: weakref.ref[Any]) -> None:
        self._storage = storage
        self._copy: Any = None

    def _filled(self) -> Any:
        storage: Any = self._storage()  # lives: torch calls this as its method
        # One as long as the storage lives: torch finds by its file what it has sent before.
        self._copy = storage.clone() if self._copy is None else self._copy.copy_(storage)
        warnings.warn(
            f"a tensor in memory that ranks share ({size_text(storage.nbytes())}) goes to another process by "
            "torch.multiprocessing as a copy: what is written to one is not seen in the other",
            RuntimeWarning,
            stacklevel=2,
        )
        return self._copy

    def share_by_descriptor(self) -> Any:
        """Return descriptor and size, in torch's strategy ``file_descriptor``."""
        return self._filled()._share_fd_cpu_()

    def share_by_name(self) -> Any:
        """Return manager, name and size, in torch's strategy ``file_system``."""
        return self._filled()._share_filename_cpu_()

    def keep(self) -> None:
        """Count a receiver, in torch's strategy ``file_system``."""
        if self._copy is not None:
            self._copy._shared_incref()


def _always() -> bool:
    return True


def private_storage(buffer: Any) -> torch.UntypedStorage:
    """Return the storage over a writable buffer that belongs to this process."""
    import torch

    if not len(buffer):
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def locate_tensor(tensor: torch.Tensor, store: LocatingStore) -> Location | None:
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


def find_shared(
    storage: torch.UntypedStorage, store: LocatingStore, content: Root | None = None
) -> Root | None:
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


_adopted: weakref.WeakKeyDictionary[LocatingStore, dict[int, tuple[weakref.ref[Any], Root]]] = (
    weakref.WeakKeyDictionary()
)
"""By store and address: the storages that torch has shared, and their memory as a segment."""


def _adopt(storage: torch.UntypedStorage, store: LocatingStore) -> Root | None:
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
    fd = _descriptor(place.path, place.inode)
    if fd is None:
        return None
    source = SegmentSource(fd, 0, MAPPED_FILES)
    source.nbytes = os.fstat(fd).st_size
    return source, place.offset


def _descriptor(path: str, inode: int) -> int | None:
    """Return a new descriptor of a mapped file: by its name, or from one that is open."""
    places = [path]
    if path.endswith(" (deleted)"):
        places = [place.path for place in os.scandir("/proc/self/fd") if _is_open_at(place.path, inode)]
    for place in places:
        try:
            fd = os.open(place, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        if os.fstat(fd).st_ino == inode:
            return fd
        os.close(fd)
    return None


def _is_open_at(place: str, inode: int) -> bool:
    try:
        return os.stat(place).st_ino == inode
    except OSError:  # closed since, as that of the listing itself
        return False
