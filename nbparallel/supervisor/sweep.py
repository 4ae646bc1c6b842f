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


@dataclass(frozen=True, slots=True)
class StaleName:
    """A segment's name that was found, and what became of it."""

    path: str
    """Where it is, or was."""
    nbytes: int
    """Memory or disk space behind it in bytes."""
    removed: bool
    """Whether it is gone now."""
    needed: bool | None
    """Whether a process needs it; None: neither is certain."""
    reason: str
    """How that is known, or why it is not."""
    notebook: int
    """Process id of the notebook or script in whose session it was made; 0: not known."""


def removal_text(names: Iterable[StaleName | None]) -> str:
    """Return the line about what was removed, of what `steps` yielded; empty if nothing was."""
    removed = [name for name in names if name is not None and name.removed]
    if not removed:
        return ""
    segments = "1 stale segment" if len(removed) == 1 else f"{len(removed)} stale segments"
    sessions = len({name.notebook for name in removed})
    whose = "a session" if sessions == 1 else f"{sessions} sessions"
    size = size_text(sum(name.nbytes for name in removed))
    return f"removed {segments} ({size}) of {whose} that ended without cleaning up"


def look(places: Iterable[str] | None = None) -> tuple[StaleName, ...]:
    """Return the names that a sweep would find, without removing anything."""
    return tuple(name for name in steps(places, most_nbytes=-1) if name is not None)


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
    removed, needed = False, None
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
            needed, reason = True, "a process that needs it lives"
        except OSError as error:
            reason = f"it cannot be opened: {error.strerror}"
        else:
            needed, reason = False, "the processes that needed it have ended"
            try:
                if nbytes <= most_nbytes:
                    os.unlink(path)
                    removed = True
            except OSError as error:
                reason = f"it could not be removed: {error.strerror}"
            finally:
                os.close(fd)
    return StaleName(path, nbytes, removed, needed, reason, notebook)


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
        _remove(locked_names.SHARED_MEMORY, f"sem.nbp-{session}-", os.unlink)
        # tempfile itself is large to import
        for place in {os.environ.get("TMPDIR") or "/tmp", "/tmp"}:
            _remove(place, f"nbp-{session}-", _remove_folder)
    # not of os.getppid(): this process gets another parent before the last thread of the first one has ended
    exits = is_exiting(options.get("pid", 0))
    if (folder or semaphores) and is_ready(parent, EXIT_SECONDS if exits else 0):
        if semaphores:
            _remove(locked_names.SHARED_MEMORY, f"sem.{semaphores}-", os.unlink)
        if folder:
            _remove_folder(folder)


def _remove(place: str, prefix: str, remove: Callable[[str], object]) -> None:
    """Remove what lies in a directory under names that begin so."""
    with contextlib.suppress(OSError):  # not Linux, or not ours
        for name in os.listdir(place):
            if name.startswith(prefix):
                with contextlib.suppress(OSError):  # the tracker was quicker
                    remove(f"{place}/{name}")


def _remove_folder(path: str) -> None:
    import shutil  # seldom used, and large

    shutil.rmtree(path, ignore_errors=True)


def sweep_and_notify(notify: Callable[[bytes], object]) -> Iterator[None]:
    """Sweep, one name at a time, and end orphans; then call `notify` with what was done, as JSON."""
    found = []
    for name in steps():
        found.append(name)
        yield

    sentences = [removal_text(found), orphans_text(end_orphans())]
    notify(json.dumps({"sentences": [sentence for sentence in sentences if sentence]}).encode())
