"""The sweep: removes the names that dead sessions left, and nothing else.

While notebook or supervisor lives, names go with their session (`ledger`, note [names]).  If both were
killed together, or a script without a session, they stay, with the memory behind them.  The next session
looks at all names that begin as ours do, reads the owner record beside each (`wire.owners`), and removes
those whose owner is dead for sure (`death`), of this user, and made as ours are.  All else stays and can be
listed.

Several sweeps at the same time do no harm: a name is removed by one of them.  Nor does a session that has
just begun: its record is there before its first name, and a name without a record is kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from nbparallel.supervisor.children import is_exiting
from nbparallel.supervisor.event_loop import is_ready
from nbparallel.supervisor.owner_liveness import Liveness, LivenessResult, OwnerLiveness
from nbparallel.wire import owners
from nbparallel.wire.identity import Process, boot_time, this_world
from nbparallel.wire.owners import Owner
from nbparallel.wire.segments import NAME_PREFIX
from nbparallel.wire.units import size_text

LOCAL_DISKS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "bcachefs", "overlay"})
"""Kinds of file systems that outlive a boot and that two machines never use at the same time."""


LARGE = 256 << 20
"""So many bytes take some ten milliseconds to free."""
Remove: TypeAlias = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class StaleName:
    """A segment's name that was found, and what became of it."""

    path: str
    """Where it is, or was."""
    nbytes: int
    """Memory or disk space behind it in bytes."""
    removed: bool
    """Whether it is gone now."""
    liveness: Liveness
    """Whether its owner lives."""
    reason: str
    """How that is known, or why it is not."""
    session: str
    """Distinguishes sessions: process id of the notebook or script and its start; empty: not known."""


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What one sweep found."""

    removed: tuple[StaleName, ...]
    """Names of dead sessions, which are gone now."""
    left: tuple[StaleName, ...]
    """Names that stay: their owner lives, or that is not known."""

    @property
    def unknown(self) -> tuple[StaleName, ...]:
        """Names that stay although no living session of this user is known to need them."""
        return tuple(name for name in self.left if name.liveness is not Liveness.LIVING)

    @property
    def sentence(self) -> str:
        """The sentence for the user; empty if nothing was removed."""
        sessions = len({name.session for name in self.removed})
        return removal_text(len(self.removed), sum(name.nbytes for name in self.removed), sessions)


def removal_text(count: int, nbytes: int, sessions: int) -> str:
    """Return the line about what was removed; empty if nothing was.

    >>> removal_text(3, 412 << 20, 1)
    'removed 3 stale segments (412.0 MiB) of a session that ended without cleaning up'
    """
    if not count:
        return ""
    segments = "1 stale segment" if count == 1 else f"{count} stale segments"
    whose = "a session" if sessions == 1 else f"{sessions} sessions"
    return f"removed {segments} ({size_text(nbytes)}) of {whose} that ended without cleaning up"


def unlink(path: str, nbytes: int) -> None:
    """Remove a name; `nbytes` lie behind it."""
    os.unlink(path)


def unlink_aside(path: str, nbytes: int) -> None:
    """Remove a name without waiting until all its memory is free: that takes a second for some gigabytes.

    Only for a process with one thread, which reaps its children.
    """
    if nbytes < LARGE:
        os.unlink(path)
        return
    held = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.unlink(path)
        with contextlib.suppress(OSError):  # no process can be made: then this one frees it
            if os.fork() == 0:
                os._exit(0)  # frees it, as the last one that has it open
    finally:
        os.close(held)


def sweep(places: Iterable[str] | None = None) -> SweepReport:
    """Remove the names of dead sessions in one go; see `steps` for the parameter."""
    return report_of(steps(places))


def look(places: Iterable[str] | None = None) -> SweepReport:
    """Return what a sweep would find, without removing anything: ``removed`` is empty."""
    return report_of(steps(places, remove=None))


def report_of(found: Iterable[StaleName | None]) -> SweepReport:
    """Put together what `steps` yielded."""
    names = [name for name in found if name is not None]
    return SweepReport(
        tuple(name for name in names if name.removed), tuple(name for name in names if not name.removed)
    )


def steps(
    places: Iterable[str] | None = None, *, remove: Remove | None = unlink
) -> Iterator[StaleName | None]:
    """Sweep in small steps: at most one name is removed in each; None where nothing was found.

    Parameters
    ----------
    places : iterable of path, optional
        Directories to look at, and those that pointers there name; by default the usual ones.
    remove : callable, optional
        Called with a path and the bytes behind it; its `OSError` leaves the name there.  None: only look.
    """
    waiting = list(owners.usual_places() if places is None else places)
    owner_liveness = OwnerLiveness(this_world(), boot_time())
    seen: set[tuple[int, int]] = set()
    pointers: list[tuple[str, Owner]] = []
    while waiting:
        directory = waiting.pop(0)
        try:
            status = os.stat(directory)
            names = [name for name in os.listdir(directory) if name.startswith(NAME_PREFIX)]
        except OSError:
            continue
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        yield None
        for name in names:
            pointer = _pointer(directory, name)
            if pointer is not None:
                pointers.append(pointer)
                waiting.append(pointer[1].directory)
        yield from _Directory(directory, names, owner_liveness).steps(remove=remove)
    for path, owner in pointers:
        if remove and _spent(path, owner, owner_liveness):
            _unlink(path)
        yield None


class _Directory:
    """One directory in which names were found."""

    def __init__(self, path: str, names: list[str], owner_liveness: OwnerLiveness) -> None:
        self._path = path
        self._names = names
        self._owner_liveness = owner_liveness
        self._on_disk: bool | None = None

    def steps(self, *, remove: Remove | None) -> Iterator[StaleName | None]:
        groups: dict[str, list[str]] = {}
        for name in sorted(self._names):
            if owners.pointer_stem(name):
                continue
            stem = owners.stem_of(name) or owners.record_stem(name)
            members = groups.setdefault(stem, [])
            if not owners.record_stem(name):
                members.append(name)
        for stem, members in groups.items():
            owner, result = self._check_owner(stem)
            complete = True
            for name in members:
                found = self._deal_with(name, owner, result, remove=remove)
                complete = complete and (found is None or found.removed)
                yield found
            if remove and result.liveness is Liveness.DEAD and complete:
                _unlink(self._record(stem))
                yield None

    def _record(self, stem: str) -> str:
        return os.path.join(self._path, f"{stem}.owner")

    def _check_owner(self, stem: str) -> tuple[Owner | None, LivenessResult]:
        if not stem:
            return None, LivenessResult(Liveness.UNKNOWN, "the name is not made as this version makes names")
        record = self._record(stem)
        try:
            status = os.lstat(record)
            if status.st_uid != os.geteuid():
                return None, LivenessResult(
                    Liveness.UNKNOWN, f"the owner record is of another user ({status.st_uid})"
                )
            owner = Owner.parse(owners.read(record))
        except FileNotFoundError:
            return None, LivenessResult(Liveness.UNKNOWN, "there is no owner record beside it")
        except OSError as error:
            return None, LivenessResult(
                Liveness.UNKNOWN, f"the owner record cannot be read: {error.strerror}"
            )
        except ValueError:
            return None, LivenessResult(Liveness.UNKNOWN, "the owner record is damaged or of another version")
        if self._on_disk is None:
            self._on_disk = lies_on_local_disk(self._path)
        return owner, self._owner_liveness.check(owner, status.st_ctime, on_disk=self._on_disk)

    def _deal_with(
        self, name: str, owner: Owner | None, result: LivenessResult, *, remove: Remove | None
    ) -> StaleName | None:
        path = os.path.join(self._path, name)
        try:
            status = os.lstat(path)
        except OSError:
            return None  # removed since, and its record with it
        session = "" if owner is None else _session(owner.head)
        nbytes, liveness, reason = status.st_blocks * 512, result.liveness, result.reason
        if status.st_uid != os.geteuid():
            liveness, reason = Liveness.UNKNOWN, f"of another user ({status.st_uid})"
        elif not stat.S_ISREG(status.st_mode):
            liveness, reason = Liveness.UNKNOWN, "no file"
        removed = False
        if remove and liveness is Liveness.DEAD:
            try:
                remove(path, nbytes)
                removed = True
            except FileNotFoundError:
                return None  # another sweep was quicker
            except OSError as error:
                reason = f"it could not be removed: {error.strerror}"
        return StaleName(path, nbytes, removed, liveness, reason, session)


def _session(head: Process) -> str:
    return f"{head.pid}:{head.started}"


def _pointer(directory: str, name: str) -> tuple[str, Owner] | None:
    """Return a pointer of this user's and what it says; None if it is none that can be trusted."""
    path = os.path.join(directory, name)
    if not owners.pointer_stem(name):
        return None
    try:
        if os.lstat(path).st_uid != os.geteuid():
            return None
        owner = Owner.parse(owners.read(path))
    except (OSError, ValueError):
        return None
    return (path, owner) if os.path.isabs(owner.directory) else None


def _spent(path: str, owner: Owner, owner_liveness: OwnerLiveness) -> bool:
    """Return whether a pointer leads to nothing any more, and its owner is dead."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    record = os.path.join(owner.directory, f"{owners.pointer_stem(os.path.basename(path))}.owner")
    if os.path.lexists(record):
        return False
    on_disk = lies_on_local_disk(os.path.dirname(path))
    return owner_liveness.check(owner, status.st_ctime, on_disk=on_disk).liveness is Liveness.DEAD


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # another sweep was quicker, or it is not ours to remove


def lies_on_local_disk(directory: str) -> bool:
    """Return whether a directory's files outlive a boot and are this machine's alone."""
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    kinds = set()
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                before, _, after = line.partition(" - ")
                if before.split()[2] == number:
                    kinds.add(after.split()[0])
    except (OSError, IndexError):
        return False
    return bool(kinds) and kinds <= LOCAL_DISKS


EXIT_SECONDS = 10.0
"""Bound for the last steps of a process that has closed its descriptors because it ends; no other waits."""


def remove_leftovers(options: Mapping[str, Any], parent: int) -> None:
    """Remove what multiprocessing has left of processes that have ended.

    Its resource tracker does that, but ends with its process where a whole process group is killed, as front
    ends do with a kernel, and this supervisor with what a rank has started.

    Parameters
    ----------
    options : mapping
        ``pid`` of this process's first parent; ``session``, whose ranks begin names of semaphores and
        folders with ``nbp-SESSION``; ``folder`` and ``semaphores``: that parent's temporary folder, and
        what the names of its semaphores begin with, which are left if it goes on.
    parent : int
        pidfd of the parent, which has closed its sockets: it ends, or goes on without this process.
    """
    session, folder, semaphores = (options.get(name, "") for name in ("session", "folder", "semaphores"))
    if session:
        _remove_semaphores(f"nbp-{session}")
        _remove_folders(f"nbp-{session}-")
    # not of os.getppid(): this process gets another parent before the last thread of the first one has ended
    exits = is_exiting(options.get("pid", 0))
    if (folder or semaphores) and is_ready(parent, EXIT_SECONDS if exits else 0):
        if semaphores:
            _remove_semaphores(semaphores)
        if folder:
            import shutil  # seldom used, and large

            shutil.rmtree(folder, ignore_errors=True)


def _remove_semaphores(prefix: str) -> None:
    """Remove the semaphores whose names begin so; sem_overview(7) says where they are."""
    with contextlib.suppress(FileNotFoundError):  # not Linux, or the tracker was quicker
        for name in os.listdir("/dev/shm"):
            if name.startswith(f"sem.{prefix}-"):
                with contextlib.suppress(OSError):
                    os.unlink(f"/dev/shm/{name}")


def _remove_folders(prefix: str) -> None:
    """Remove ranks' temporary folders, whose names begin so; tempfile itself is large to import."""
    for place in {os.environ.get("TMPDIR") or "/tmp", "/tmp"}:
        with contextlib.suppress(OSError):
            for name in os.listdir(place):
                if name.startswith(prefix):
                    import shutil

                    shutil.rmtree(f"{place}/{name}", ignore_errors=True)


class BackgroundSweep:
    """A sweep that begins with `begin` and calls `notify` with what it removed, as JSON, when it is over."""

    def __init__(self, notify: Callable[[bytes], None]) -> None:
        self._notify = notify
        self._steps: Iterator[Any] | None = None
        self._found: list[Any] = []

    @property
    def pending(self) -> bool:
        """Whether there is more to do."""
        return self._steps is not None

    def begin(self) -> None:
        """Make the first step the next thing to do."""
        self._steps = steps(remove=unlink_aside)

    def step(self) -> None:
        """Look at one name, and remove it if its owner is dead; nothing if it is over."""
        if self._steps is None:
            return
        try:
            self._found.append(next(self._steps))
            return
        except StopIteration:
            self._steps = None
        except OSError:
            self._steps = None  # a directory that went away under us: the next sweep looks again
        from nbparallel.supervisor import orphans  # by now the template was started, which takes longer

        sentences = [report_of(self._found).sentence, orphans.orphans_text(orphans.end_orphans())]
        self._found = []
        self._notify(json.dumps({"sentences": [sentence for sentence in sentences if sentence]}).encode())
