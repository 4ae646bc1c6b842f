"""Locked names: files that begin with ``nbp_``, each locked (flock(2)) as long as a process needs it.

A segment with a name is a file; its maker locks it before anything else, and the supervisor has the same
open file through the socket.  So have forked children, and what maps it through that descriptor.  The
system drops the lock with the last of them, however they end, in whatever container, and with the machine.
A name that can be locked exclusively is therefore stale, for certain, and no pid has to be compared.

Some facts (flock(2), and Linux since 2.6.12 for nfs):

* a lock belongs to the open file: descriptors that were inherited, duplicated or sent share it, mappings keep
  it, and opening the file again does not;
* file systems of other machines may keep locks to themselves (``local_lock`` of nfs, 9p, many of FUSE): there
  an unlocked name proves nothing.  In overlayfs, ext4, btrfs, xfs and tmpfs all processes see them;
* between ``open`` and ``flock`` a sweep may be quicker: then the new file has no name, and another is drawn.

A sweep looks in a few usual directories: what a killed notebook leaves in another one, which its user has
chosen, stays there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from functools import lru_cache

from nbparallel.wire.segments import NAME_PREFIX

SHARED_MEMORY = "/dev/shm"
"""Where names in memory are."""
ON_DISK = "/var/tmp"
"""Where large temporary files are; it is kept when the machine boots (hier(7))."""
LETTERS = "abcdefghijklmnopqrstuvwxyz234567"
"""Digits of numbers in names."""
PID_LETTERS = 5
"""A pid has 22 bits (proc(5), pid_max)."""
_NAME = re.compile(rf"{NAME_PREFIX}([a-z2-7]{{{PID_LETTERS}}})_[a-z2-7]{{5}}_[a-z2-7]+")
_SEEN_BY_ALL = frozenset(
    {"tmpfs", "ramfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "bcachefs", "overlay"}
)
"""Kinds of file systems whose locks all processes see that see the files."""


def stem(pid: int, number: int) -> str:
    """Return what the names of one process begin with: the notebook's (or script's) pid, and a random number.

    >>> stem(1234, 7)
    'nbp_saaba_haaaa'
    """
    letters = [LETTERS[value >> 5 * i & 31] for value in (pid, number) for i in range(PID_LETTERS)]
    return f"{NAME_PREFIX}{''.join(letters[:PID_LETTERS])}_{''.join(letters[PID_LETTERS:])}"


def notebook_of(name: str) -> int:
    """Return the pid of the notebook (or script) in whose session a name was made; 0: it is none of ours.

    >>> notebook_of("nbp_saaba_haaaa_b"), notebook_of("thesis.tex")
    (1234, 0)
    """
    found = _NAME.fullmatch(name)
    return 0 if found is None else sum(LETTERS.index(letter) << 5 * i for i, letter in enumerate(found[1]))


def hold(fd: int) -> bool:
    """Lock a file that was just made; False if a sweep has found it before: make another one."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks: no sweep removes anything there
    return os.fstat(fd).st_nlink > 0


def seize(path: str) -> int:
    """Return a descriptor of a stale file, locked until it is closed; remove the name while it is open.

    Raises
    ------
    BlockingIOError
        A process needs it, or sweeps it.
    OSError
        It cannot be opened or locked.
    """
    # O_NONBLOCK, because it may be anything, a FIFO for example
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not os.path.samestat(os.fstat(fd), os.lstat(path)):
            raise BlockingIOError(errno.EAGAIN, "another file has this name by now", path)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(fd)
        raise
    return fd


def unseen_reason(directory: str) -> str:
    """Return why an unlocked file there may be in use all the same; empty if it cannot."""
    kind = file_system_of(directory)
    return "" if kind in _SEEN_BY_ALL else f"its file system ({kind or 'unknown'}) may not show others' locks"


def usual_places() -> tuple[str, ...]:
    """Return the directories in which every sweep looks for stale names."""
    variables = (os.environ[name] for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name))
    places = map(os.path.realpath, (SHARED_MEMORY, ON_DISK, next(variables, "/tmp")))
    return tuple(dict.fromkeys(path for path in places if os.path.isdir(path)))


def file_system_of(path: str) -> str:
    """Return the kind of file system that holds `path`; empty if the system does not say.

    >>> file_system_of("/proc/self")
    'proc'
    """
    try:
        device = os.stat(path).st_dev
    except OSError:
        device = 0
    return _file_system_on(path, device)


@lru_cache(maxsize=64)
def _file_system_on(path: str, device: int) -> str:
    """Return the kind for a path on this device: another one, if something is mounted over it."""
    path = os.path.realpath(path)
    best, kind = "", ""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            lines = file.readlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].encode("latin-1", "backslashreplace").decode("unicode_escape")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, after.split()[0]
    return kind
