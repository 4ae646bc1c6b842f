"""``from_file``: an array in a file that the user keeps, as shared memory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import math
import os
import stat
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy_format

from nbparallel.errors import NbParallelError, ObjectArrayError, StrategyUnavailableError
from nbparallel.sharing.memory.array_layout import Shape, describe_dtype, sizes_of
from nbparallel.sharing.memory.mapping import Access
from nbparallel.sharing.store import AnyArray, current_store
from nbparallel.sharing.strategies.memory_map import MemoryMapStrategy
from nbparallel.sharing.strategies.named_files import network_reason
from nbparallel.sharing.strategies.owned_names import process_names
from nbparallel.sharing.strategies.page_allocation import SegmentDirectory, explained, fill
from nbparallel.sharing.strategies.strategy import SegmentSource
from nbparallel.wire.locked_names import hold

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
        if not stat.S_ISREG(os.fstat(source.fd).st_mode):
            raise ValueError(f"{path} is no regular file")
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
