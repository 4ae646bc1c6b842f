"""Shared arrays: the functions of `nbparallel` that make them, named as numpy's."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, overload

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy_format

from nbparallel.errors import (
    NbParallelError,
    NotAnArrayError,
    ObjectArrayError,
    ReadOnlyArrayError,
    StrategyUnavailableError,
    with_article,
)
from nbparallel.errors.text.table import Table, TableView
from nbparallel.sharing.lifecycle.segment import SegmentStatistics
from nbparallel.sharing.memory.array_layout import Shape, describe_dtype, sizes_of
from nbparallel.sharing.memory.mapping import Access
from nbparallel.sharing.store import AnyArray, Order, current_store
from nbparallel.sharing.strategies.named_files import MemoryMapStrategy, network_reason
from nbparallel.sharing.strategies.page_allocation import SegmentDirectory, explained, fill
from nbparallel.sharing.strategies.registry import get_sharing_strategy
from nbparallel.sharing.strategies.strategy import SegmentSource, process_names
from nbparallel.sharing.tensor_storage import are_shared, holds_tensors, share_tensors
from nbparallel.wire.locked_names import hold
from nbparallel.wire.units import size_column, size_text

if TYPE_CHECKING:
    import torch

# ``from_file``: an array in a file that the user keeps, as shared memory.

_FLAGS = {"r": os.O_RDONLY, "r+": os.O_RDWR, "w+": os.O_RDWR | os.O_CREAT | os.O_EXCL}


def from_file(
    path: str | os.PathLike[str],
    dtype: npt.DTypeLike | None = None,
    shape: Shape | None = None,
    mode: str = "r",
    *,
    allow_network: bool = False,
) -> AnyArray:
    """Return the array in a file as a shared one; nothing is read until it is used.

    It may be larger than memory, every rank sees the same pages, and what is written with mode ``"r+"`` or
    ``"w+"`` is in the file afterwards: such an array survives a restart of the notebook.

    Parameters
    ----------
    path : path
        A ``.npy`` file as `numpy.save` makes it, or raw values (then `dtype` is needed).
    dtype : dtype, optional
        Of raw values, or of a new file.
    shape : int or sequence of ints, optional
        Of raw values (by default as many as there are, one-dimensional), or of a new file.
    mode : {"r", "r+", "w+"}
        Read; read and write, on every rank; make the file, full of zeros (one that exists is replaced).
    allow_network : bool
        Use the file although it lies on a network file system.  Within one machine that works; what others
        write is seen late or never, and a disk that runs full kills the process that writes (SIGBUS).

    Raises
    ------
    FileNotFoundError, PermissionError
        As `open`.
    ValueError
        The file does not hold what was asked for, is damaged, or empty.
    ObjectArrayError
        It holds Python objects.
    SharedMemoryFullError
        The disk is full.
    StrategyUnavailableError
        The file lies on a network file system.

    Notes
    -----
    Truncating the file while it is used kills processes that map it (SIGBUS).  ``"w+"`` does not: it puts a
    new file in the old one's place, and arrays of the old one keep what they had.  It also reserves the disk;
    a file with holes that was made elsewhere does not, and writing into a hole of a full disk kills as well.

    No call is needed to save: writing *is* saving, and `numpy.save` writes any shared array.

    Examples
    --------
    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "a.npy")
    >>> a = from_file(path, dtype="i4", shape=(2, 2), mode="w+")
    >>> a[0] = 7
    >>> np.load(path)
    array([[7, 7],
           [0, 0]], dtype=int32)
    """
    if mode not in _FLAGS:
        raise ValueError(f"mode must be 'r', 'r+' or 'w+', not {mode!r}")
    full = os.path.realpath(os.fspath(path))
    reason = None if allow_network else network_reason(full)
    if reason is not None:
        raise StrategyUnavailableError(reason)
    wanted = None if dtype is None else np.empty(0, dtype).dtype
    if wanted is not None:
        describe_dtype(wanted)
    sizes = None if shape is None else sizes_of(shape)
    if mode != "w+":
        source, form = _open(full, mode, wanted, sizes)
    elif wanted is None or sizes is None:
        raise TypeError("a new file needs dtype= and shape=")
    else:
        source, form = _make(full, wanted, sizes)
    try:
        source.nbytes = os.fstat(source.fd).st_size
        access = Access.READ if mode == "r" else Access.WRITE
        root = current_store().adopt(source, access, for_all=mode != "r")
    except BaseException:
        source.close()
        raise
    offset, found, sizes, order = form
    return np.ndarray(sizes, found, root, offset, None, "F" if order else "C")


_Form = tuple[int, np.dtype[Any], tuple[int, ...], bool]
"""Offset of the first element, dtype, shape, whether the first axis varies fastest."""


def _make(path: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[SegmentSource, _Form]:
    header = io.BytesIO()
    if path.endswith(".npy"):
        described = {"descr": npy_format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        npy_format.write_array_header_2_0(header, described)
    offset = header.tell()
    size = max(offset + math.prod(shape) * dtype.itemsize, 1)
    disk = SegmentDirectory(os.path.dirname(path), "choose a path on another disk", "delete files there")
    disk.require(size)
    # It gets its name when it is complete.
    draft = os.path.join(disk.path, process_names.draw())
    try:
        process_names.claim(draft)
        source = SegmentSource(-1, 0, MemoryMapStrategy().name, draft)
        try:
            source.fd = os.open(draft, _FLAGS["w+"] | os.O_CLOEXEC, 0o666)
            if not hold(source.fd):
                source.close()
                return _make(path, dtype, shape)
            fill(source.fd, size, memoryview(header.getvalue()))  # not of `header`: an error keeps it longer
            os.replace(draft, path)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(source.fd, fcntl.LOCK_UN)  # from now on it is the user's
        except BaseException:
            source.close()
            raise
    except OSError as error:
        raise _user_error(error, size, disk, path) from error
    source.path = ""
    process_names.disclaim(draft)
    return source, (offset, dtype, shape, False)


def _user_error(error: OSError, nbytes: int, disk: SegmentDirectory, path: str) -> OSError | NbParallelError:
    """Return an error about the user's file, not about the draft."""
    if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EMFILE, errno.ENFILE):
        return explained(error, nbytes, disk)
    return OSError(error.errno, error.strerror, path if os.path.isdir(path) else disk.path)


def _open(
    path: str, mode: str, dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None
) -> tuple[SegmentSource, _Form]:
    source = SegmentSource(os.open(path, _FLAGS[mode] | os.O_CLOEXEC), 0, MemoryMapStrategy().name)
    try:
        return source, _read_form(source.fd, path, dtype, shape)
    except BaseException:
        source.close()
        raise


def _read_form(fd: int, path: str, dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None) -> _Form:
    size = os.fstat(fd).st_size
    with open(fd, "rb", closefd=False) as file:
        magic = file.read(len(npy_format.MAGIC_PREFIX))
        file.seek(0)
        form = _header(file, path) if magic == npy_format.MAGIC_PREFIX else None
    if form is None:
        if dtype is None:
            raise ValueError(f"{path} is no .npy file: raw values need dtype=")
        sizes = (size // dtype.itemsize if dtype.itemsize else 0,) if shape is None else shape
        # One byte is what the file of an array without elements has.
        if shape is None and size > 1 and sizes[0] * dtype.itemsize != size:
            raise ValueError(
                f"{path} has {size} bytes, no whole number of {dtype} ({dtype.itemsize} bytes each)"
            )
        form = 0, dtype, sizes, False
    offset, found, sizes, _ = form
    if (dtype is not None and dtype != found) or (shape is not None and shape != sizes):
        raise ValueError(f"{path} holds {found} of shape {sizes}, not {dtype or found} of {shape or sizes}")
    needed = offset + math.prod(sizes) * found.itemsize
    if not size:
        raise ValueError(f"{path} is empty: there is no memory to share")
    if size < needed:
        raise ValueError(f"{path} has {size} bytes, {found} of shape {sizes} needs {needed}")
    return form


def _header(file: BinaryIO, path: str) -> _Form:
    readers = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}
    try:
        version = npy_format.read_magic(file)
        # Version 3 has field names that are not latin-1; numpy has no public reader for it.
        found = readers[version](file) if version in readers else None
    except ValueError as error:
        raise ValueError(f"{path} is a damaged .npy file: {error}") from error
    if found is None:
        raise ValueError(
            f"{path} is a .npy file of version {version[0]}, which numpy.save makes of field names that are "
            "not latin-1: numpy.load it, rename those fields, and save it again"
        )
    shape, fortran, dtype = found
    if min(shape, default=0) < 0:
        raise ValueError(f"{path} is a damaged .npy file: its header gives the shape {shape}")
    if dtype.hasobject:
        raise ObjectArrayError(f"{path} holds Python objects, whose memory cannot be shared: use numpy.load")
    return file.tell(), dtype, shape, fortran


# SegmentList: the segments that a process uses, as a sequence that prints as a table.

SHOWN = 50
"""Rows of the printed table; the sequence itself is complete."""


class SegmentList(TableView, tuple[SegmentStatistics, ...]):
    """Records of segments; compares and iterates as the tuple that it is."""

    __slots__ = ()

    def table(self) -> Table:
        """Return a row for each segment in use, the largest first, and a line about what is kept."""
        used = sorted((s for s in self if s.phase != "pooled"), key=lambda s: -s.nbytes)
        named = any(record.path for record in used[:SHOWN])
        unit, sizes = size_column([record.nbytes for record in used[:SHOWN]])
        rows = [
            (
                f"{record.segment:#x}",
                record.strategy,
                size,
                record.phase,
                "here" if record.own else "elsewhere",
                _writers(record),
                *([record.path] if named else ()),
            )
            for record, size in zip(used, sizes, strict=False)
        ]
        total = size_text(sum(record.nbytes for record in used))
        return Table(
            f"shared memory of this process: {segments_text(len(used))}, {total}",
            ("segment", "strategy", unit, "phase", "made", "may be written", *(["name"] if named else ())),
            rows,
            "\n".join(line for line in (left_out(used), self._kept()) if line),
        )

    def _kept(self) -> str:
        pooled = [record.nbytes for record in self if record.phase == "pooled"]
        return kept_text(sum(pooled), len(pooled)) if pooled else ""


def segments_text(count: int) -> str:
    """Return ``1 segment``, ``2 segments``.

    >>> segments_text(1), segments_text(0)
    ('1 segment', '0 segments')
    """
    return f"{count:,} segment{'s' * (count != 1)}"


def kept_text(nbytes: int, count: int = 0) -> str:
    """Return the line about memory that is kept for the next arrays."""
    where = f" in {segments_text(count)}" if count else ""
    return f"kept for the next arrays: {size_text(nbytes)}{where}; returned to the system after a while"


def left_out(used: list[SegmentStatistics]) -> str:
    """Return a line about the smallest, if there are too many to be shown."""
    rest = used[SHOWN:]
    return f"… and {len(rest):,} smaller ones, {size_text(sum(s.nbytes for s in rest))}" if rest else ""


def _writers(record: SegmentStatistics) -> str:
    if record.read_only:
        return "by none"
    if record.own:
        return "by every process" if record.writable else "here only"
    return "here too" if record.writable else "not here"


S = TypeVar("S", bound=np.generic)


T = TypeVar("T", bound="torch.Tensor | torch.nn.Module")


@overload
def share(x: npt.NDArray[S], *, strategy: str | None = None) -> npt.NDArray[S]: ...


@overload
def share(x: T, *, strategy: str | None = None) -> T: ...


def share(x: Any, *, strategy: str | None = None) -> Any:
    """Return `x` in shared memory, writable by every rank.

    Other ranks need not do anything: they see the array when the cell names it, or when it is sent.

    Parameters
    ----------
    x : ndarray of any shape and strides, of any dtype without Python objects
        Read, never written.  Lists and numbers are converted first.
    x : torch.Tensor or torch.nn.Module
        A dense tensor of the CPU, or a module whose parameters and buffers all are.
    strategy : str, optional
        Name of a sharing strategy, by default the current one.

    Returns
    -------
    ndarray
        `x` itself if it is shared already, else a copy: later writes to `x` do not show in it.  Nothing is
        re-bound: write ``x = nbp.share(x)``.  A view is copied with its own elements only, and keeps its
        shape, dtype and, as far as possible, strides.
    torch.Tensor or torch.nn.Module
        `x` itself, moved in place: whatever holds the tensor, or the parameters, sees the shared memory, and
        tied parameters stay tied.  A view that was made before, or an array of numpy over the old memory,
        keeps the old values: views and tied tensors are named in a RuntimeWarning.  What torch's
        ``share_memory_()`` has moved is shared already.

    Raises
    ------
    NotAnArrayError, ObjectArrayError
        `x` is an array of a subclass, or a tensor that is sparse, quantised or on another device; it holds
        Python objects.
    ReadOnlyArrayError
        On a rank: `x` is the notebook's, which did not make it writable.
    SharedMemoryFullError, FileDescriptorLimitError
        It does not fit.
    StrategyUnavailableError, ValueError
        The strategy does not work here, or does not exist.

    Examples
    --------
    >>> import numpy as np
    >>> a = share(np.arange(3))
    >>> is_shared(a), is_shared(a[1:]), is_shared(a + 1)
    (True, True, False)
    """
    if holds_tensors(x):
        return share_tensors(x, current_store(), strategy=strategy)
    if type(x) not in (np.ndarray, np.memmap) and isinstance(x, np.ndarray):
        raise NotAnArrayError(
            f"share takes plain numpy arrays, not {type(x).__name__}: share np.asarray(x), or its parts"
        )
    if isinstance(x, (list, tuple)) and any(map(holds_tensors, x)):
        raise NotAnArrayError(
            f"share takes a tensor or a module, not {with_article(type(x).__name__)} of them: one by one"
        )
    array = np.asarray(x)
    if array.dtype.hasobject and not isinstance(x, np.ndarray):
        raise NotAnArrayError(
            f"share takes numpy arrays, and what numpy makes one of without Python objects in it, not "
            f"{type(x).__name__}: share its arrays one by one"
        )
    store = current_store()
    shared = store.share(array, strategy=strategy, for_all=True)
    store.allow_write(shared)
    if not shared.flags.writeable:
        shared = shared.view()
        try:
            shared.flags.writeable = True
        except ValueError as error:
            raise ReadOnlyArrayError(
                "another process's memory is mapped here for reading only; work on `x.copy()`"
            ) from error
    return shared


def is_shared(x: object) -> bool:
    """Return whether `x` is an array in shared memory, or a view of one; False for anything else.

    A tensor counts as the array over its memory, also where torch itself has shared it; a module if all its
    parameters and buffers do.

    Examples
    --------
    >>> is_shared(zeros(3)), is_shared([0.0])
    (True, False)
    """
    return are_shared(x, current_store()) if holds_tensors(x) else current_store().is_shared(x)


def segments() -> SegmentList:
    """Return what shared memory this process uses: made here, mapped from others, kept for reuse.

    A sequence of records, which prints as a table; ``Session.statistics`` knows the other processes' as well.

    Examples
    --------
    >>> a = zeros(1 << 20)
    >>> max(record.nbytes for record in segments())
    8388608
    """
    found = current_store().segments()
    # A name may be removed with its session, or by another program; the memory stays.
    return SegmentList(s if os.path.lexists(s.path) else replace(s, path="") for s in found)


def empty(
    shape: Shape, dtype: npt.DTypeLike = float, order: Order = "C", *, strategy: str | None = None
) -> AnyArray:
    """Return a new shared array with arbitrary content, writable by every rank.

    As `numpy.empty`; each rank that calls it gets memory of its own, which others see when it is sent.

    Parameters
    ----------
    shape : int or sequence of ints
    dtype : dtype without Python objects, optional
    order : {"C", "F"}, optional
    strategy : str, optional
        Name of a sharing strategy, by default the current one.

    Raises
    ------
    ObjectArrayError, SharedMemoryFullError, FileDescriptorLimitError
        As `share`.
    """
    strategy = strategy or get_sharing_strategy()
    return current_store().empty(shape, dtype, order, strategy=strategy, for_all=True)


def zeros(
    shape: Shape, dtype: npt.DTypeLike = float, order: Order = "C", *, strategy: str | None = None
) -> AnyArray:
    """Return a new shared array of zeros, writable by every rank; as `empty` in everything else.

    Examples
    --------
    >>> zeros((2, 2), dtype=int)
    array([[0, 0],
           [0, 0]])
    """
    strategy = strategy or get_sharing_strategy()
    return current_store().zeros(shape, dtype, order, strategy=strategy, for_all=True)


def ones(
    shape: Shape, dtype: npt.DTypeLike = float, order: Order = "C", *, strategy: str | None = None
) -> AnyArray:
    """Return a new shared array of ones, writable by every rank; as `empty` in everything else."""
    return full(shape, 1, dtype, order, strategy=strategy)


def full(
    shape: Shape,
    fill_value: Any,
    dtype: npt.DTypeLike | None = None,
    order: Order = "C",
    *,
    strategy: str | None = None,
) -> AnyArray:
    """Return a new shared array full of `fill_value`, writable by every rank.

    Parameters
    ----------
    fill_value : scalar or array that broadcasts to `shape`
    dtype : dtype, optional
        By default that of ``numpy.array(fill_value)``.

    See Also
    --------
    empty : about everything else.

    Examples
    --------
    >>> full(2, 7)
    array([7, 7])
    """
    array = empty(shape, np.asarray(fill_value).dtype if dtype is None else dtype, order, strategy=strategy)
    np.copyto(array, fill_value, casting="unsafe")
    return array
