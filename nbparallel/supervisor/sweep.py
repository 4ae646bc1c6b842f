"""The sweep: removes the names that dead sessions left, and nothing else.

While notebook or supervisor lives, names go with their session (`ledger`, note [names]).  If both were
killed together, or a script without a session, they stay, with the memory behind them.  The next session
looks at all names that begin as ours do, and removes those that no process has locked (`wire.locked_names`),
of this user, and made as ours are.  All else stays and can be listed.

Several sweeps at the same time do no harm: a name is removed by one of them.  Nor does a session that has
just begun: a name that a sweep finds before it is locked is drawn anew.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nbparallel.supervisor.children import end_orphans, is_exiting, orphans_text
from nbparallel.supervisor.clients import is_ready
from nbparallel.wire import locked_names
from nbparallel.wire.segments import NAME_PREFIX
from nbparallel.wire.units import size_text


class Liveness(enum.Enum):
    """What is known of the processes that need a name."""

    DEAD = "dead"
    """There is none, for sure."""
    LIVING = "living"
    """One of them runs."""
    UNKNOWN = "unknown"
    """Neither is certain."""


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
    """Whether a process needs it."""
    reason: str
    """How that is known, or why it is not."""
    notebook: int
    """Process id of the notebook or script in whose session it was made; 0: not known."""


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What one sweep found."""

    removed: tuple[StaleName, ...]
    """Names of dead sessions, which are gone now."""
    left: tuple[StaleName, ...]
    """Names that stay: a process needs them, or that is not known."""

    @property
    def sentence(self) -> str:
        """The sentence for the user; empty if nothing was removed."""
        sessions = len({name.notebook for name in self.removed})
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


def sweep(places: Iterable[str] | None = None) -> SweepReport:
    """Remove the names of dead sessions in one go; see `steps` for the parameter."""
    return report_of(steps(places))


def look(places: Iterable[str] | None = None) -> SweepReport:
    """Return what a sweep would find, without removing anything: ``removed`` is empty."""
    return report_of(steps(places, most_nbytes=-1))


def report_of(found: Iterable[StaleName | None]) -> SweepReport:
    """Put together what `steps` yielded."""
    names = [name for name in found if name is not None]
    return SweepReport(
        tuple(name for name in names if name.removed), tuple(name for name in names if not name.removed)
    )


def steps(
    places: Iterable[str] | None = None, *, most_nbytes: int = sys.maxsize
) -> Iterator[StaleName | None]:
    """Sweep in small steps: at most one name is removed in each; None where nothing was found.

    Parameters
    ----------
    places : iterable of path, optional
        Directories to look at; by default the usual ones.
    most_nbytes : int
        Names with more bytes behind them stay: freeing some gigabytes takes a second.
    """
    for directory in locked_names.usual_places() if places is None else places:
        try:
            names = sorted(name for name in os.listdir(directory) if name.startswith(NAME_PREFIX))
        except OSError:
            continue
        yield None
        unseen = locked_names.unseen_reason(directory)
        for name in names:
            yield _deal_with(os.path.join(directory, name), unseen, most_nbytes)


def _deal_with(path: str, unseen: str, most_nbytes: int) -> StaleName | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None  # removed since
    nbytes, notebook = status.st_blocks * 512, locked_names.notebook_of(os.path.basename(path))
    removed, liveness = False, Liveness.UNKNOWN
    if not notebook:
        reason = "the name is not made as this version makes names"
    elif status.st_uid != os.geteuid():
        reason = f"of another user ({status.st_uid})"
    elif not stat.S_ISREG(status.st_mode):
        reason = "no file"
    elif unseen:
        reason = unseen
    else:
        try:
            fd = locked_names.seize(path)
        except FileNotFoundError:
            return None  # another sweep was quicker
        except BlockingIOError:
            liveness, reason = Liveness.LIVING, "a process that needs it lives"
        except OSError as error:
            reason = f"it cannot be opened: {error.strerror}"
        else:
            liveness, reason = Liveness.DEAD, "the processes that needed it have ended"
            try:
                if nbytes <= most_nbytes:
                    os.unlink(path)
                    removed = True
            except OSError as error:
                reason = f"it could not be removed: {error.strerror}"
            finally:
                os.close(fd)
    return StaleName(path, nbytes, removed, liveness, reason, notebook)


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


def sweep_and_notify(notify: Callable[[bytes], object]) -> Iterator[None]:
    """Sweep, one name at a time, and end orphans; then call `notify` with what was done, as JSON."""
    found = []
    for name in steps():
        found.append(name)
        yield

    sentences = [report_of(found).sentence, orphans_text(end_orphans())]
    notify(json.dumps({"sentences": [sentence for sentence in sentences if sentence]}).encode())
