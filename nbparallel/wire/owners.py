"""Owner records: which processes made the names that begin with ``nbp_``, to see whether they are dead.

A process calls all its names in one session ``nbp_TOKEN_SERIAL``.  Beside them, in the same directory, lies
its record, ``nbp_TOKEN.owner``, written before the first of them and removed after the last.  It is a
symbolic link that leads nowhere: made in one step with its content, so that no process ever sees half of it,
and without taking a page of a full /dev/shm.  (Where there are no links it is a small file, 0600.)

Names in a directory that no sweep knows leave a *pointer* to it in a directory that every sweep reads.
"""

from __future__ import annotations

import errno
import os
import re
import zlib
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

from nbparallel.wire.identity import Process, World
from nbparallel.wire.segments import NAME_PREFIX

SHARED_MEMORY = "/dev/shm"
"""Where names in memory are."""
ON_DISK = "/var/tmp"
"""Where large temporary files are; it is kept when the machine boots (hier(7))."""
MAX_RECORD = 8192
"""No record is longer, in bytes."""
_NAME = re.compile(rf"({NAME_PREFIX}[a-z2-7]{{10}})_[a-z2-7]+")
_RECORD = re.compile(rf"({NAME_PREFIX}[a-z2-7]{{10}})\.owner")
_POINTER = re.compile(rf"({NAME_PREFIX}[a-z2-7]{{10}})\.at[0-9a-f]{{8}}")
_TEXT = re.compile(
    r"([0-9a-f]{16}|-) (\d{1,20}) (\d{1,20}) ([0-9a-f]{8}|-) (\d{1,10}:\d{1,20})((?: \d{1,10}:\d{1,20})+)"
    r"(?: @(.+))?",
    re.ASCII | re.DOTALL,
)
_FRONT = len("nbp1 01234567 ")
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENAMETOOLONG})


@dataclass(frozen=True, slots=True)
class Owner:
    """Processes that own segment names."""

    world: World
    """Where the processes live."""
    head: Process
    """The notebook or script whose session it is; distinguishes sessions."""
    processes: tuple[Process, ...]
    """The names are needed as long as one of them lives."""
    directory: str = ""
    """Only of a pointer: where the names are."""

    def text(self) -> str:
        """Return the content of the record, with a checksum of the rest in front.

        >>> world = World("0123456789abcdef", 4026531836, 4026531834, "89abcdef")
        >>> Owner(world, Process(7, 100), (Process(7, 100),)).text()
        'nbp1 4ae609db 0123456789abcdef 4026531836 4026531834 89abcdef 7:100 7:100'
        """
        world = self.world
        words = [world.boot or "-", str(world.pid_namespace), str(world.time_namespace), world.machine or "-"]
        words += [f"{process.pid}:{process.started}" for process in (self.head, *self.processes)]
        text = " ".join([*words, f"@{self.directory}"] if self.directory else words)
        return f"{_checked(text)}{text}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a record; `ValueError` if it is damaged or of another version."""
        rest = text[_FRONT:]
        found = _TEXT.fullmatch(rest)
        if found is None or text[:_FRONT] != _checked(rest):
            raise ValueError(f"no owner record: {text[:80]!r}")
        boot, pid_namespace, time_namespace, machine, head, processes, directory = found.groups()
        world = World(boot.strip("-"), int(pid_namespace), int(time_namespace), machine.strip("-"))
        return cls(
            world, _process(head), tuple(_process(word) for word in processes.split()), directory or ""
        )


def _checked(text: str) -> str:
    """Return what stands in front of a text: half of it, or a damaged one, must not name another owner."""
    return f"nbp1 {zlib.crc32(os.fsencode(text)):08x} "


def _process(word: str) -> Process:
    pid, started = (int(number) for number in word.split(":"))
    if not 0 < pid < 1 << 31:
        raise ValueError(f"no process has the number {pid}")
    return Process(pid, started)


def stem_of(name: str) -> str:
    """Return ``nbp_TOKEN`` of a segment's file name; empty if it is none of ours.

    >>> stem_of("nbp_abcdefghij_b"), stem_of("nbp_abcdefghij.owner"), stem_of("thesis.tex")
    ('nbp_abcdefghij', '', '')
    """
    found = _NAME.fullmatch(name)
    return "" if found is None else found[1]


def pointer_stem(name: str) -> str:
    """Return ``nbp_TOKEN`` of a pointer's file name; empty if it is none."""
    found = _POINTER.fullmatch(name)
    return "" if found is None else found[1]


def record_stem(name: str) -> str:
    """Return ``nbp_TOKEN`` of a record's file name; empty if it is none."""
    found = _RECORD.fullmatch(name)
    return "" if found is None else found[1]


def record_path(path: str) -> str:
    """Return where the record of a segment's name lies; empty if the name is not made as ours are.

    >>> record_path("/dev/shm/nbp_abcdefghij_b"), record_path("/dev/shm/nbp_mine")
    ('/dev/shm/nbp_abcdefghij.owner', '')
    """
    directory, name = os.path.split(path)
    stem = stem_of(name)
    return os.path.join(directory, f"{stem}.owner") if stem else ""


def usual_places() -> tuple[str, ...]:
    """Return the directories in which every sweep looks for stale names."""
    return _places(_temporary())


def _temporary() -> str:
    return next((os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)), "/tmp")


@lru_cache(maxsize=4)
def _places(temporary: str) -> tuple[str, ...]:
    places = [os.path.realpath(path) for path in (SHARED_MEMORY, ON_DISK, temporary)]
    return tuple(dict.fromkeys(path for path in places if os.path.isdir(path)))


def pointer_path(record: str) -> str:
    """Return where the pointer to a record's directory lies; empty if none is needed or possible."""
    return _pointer(record, _temporary())


@lru_cache(maxsize=64)
def _pointer(record: str, temporary: str) -> str:
    directory, name = os.path.split(record)
    places = _places(temporary)
    if os.path.realpath(directory) in places:
        return ""
    usable = [place for place in places if os.access(place, os.W_OK | os.X_OK)]
    chosen = ON_DISK if ON_DISK in usable else next(iter(usable), "")
    mark = f".at{zlib.crc32(os.fsencode(directory)):08x}"
    return os.path.join(chosen, record_stem(name) + mark) if chosen else ""


def write(record: str, owner: Owner) -> None:
    """Make a record and its pointer; fine if they are there already.

    Raises
    ------
    FileExistsError
        Something else has that name.
    OSError
        The directory cannot be written to.
    """
    pointer = pointer_path(record)
    if pointer:
        try:
            _write(pointer, replace(owner, directory=os.path.dirname(record)).text(), private=True)
        except OSError:
            pass  # the record still names the owner to a sweep that reads the directory
    try:
        _write(record, owner.text())
    except BaseException:
        remove_pointer(record)  # it would lead to nothing of ours
        raise


def remove(record: str) -> None:
    """Remove a record and its pointer; fine if they are gone."""
    _unlink(record)
    remove_pointer(record)


def remove_pointer(record: str) -> None:
    """Remove the pointer to a record's directory; fine if there is none."""
    _unlink(pointer_path(record))


def _unlink(path: str) -> None:
    try:
        if path:
            os.unlink(path)
    except OSError:
        pass  # another process was quicker, or the directory was removed with it


def read(path: str) -> str:
    """Return the content of a record or pointer; `OSError` if it cannot be read."""
    try:
        return os.readlink(path)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # no link; O_NONBLOCK, because it may be anything, a FIFO for example
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.fsdecode(os.read(fd, MAX_RECORD))
    finally:
        os.close(fd)


def _write(path: str, text: str, *, private: bool = False) -> None:
    if os.path.lexists(path):
        try:
            found = read(path)
        except OSError:
            found = ""  # a folder, a FIFO, another user's file; or removed since
        if found == text:
            return
        raise FileExistsError(errno.EEXIST, "there is something else of this name", path)
    if private and _link_file(path, text):
        return
    try:
        os.symlink(text, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
        try:
            os.write(fd, os.fsencode(text))
        finally:
            os.close(fd)


def _link_file(path: str, text: str) -> bool:
    """Give a complete file of mode 0600 its name, in one step; False if that does not work here."""
    if not hasattr(os, "O_TMPFILE"):
        return False
    try:
        fd = os.open(os.path.dirname(path), os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, os.fsencode(text))
            os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
        finally:
            os.close(fd)
    except OSError:
        return False
    return True
