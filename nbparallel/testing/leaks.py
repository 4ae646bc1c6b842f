"""The leak check: what a test must release, and the report of what it did not.

Some facts about counting what a process holds (proc(5), memfd_create(2)):

* ``/proc/self/fd`` shows a memfd as ``/memfd:NAME (deleted)``, and so does ``/proc/self/maps``;
* a `mmap` object of a file keeps a descriptor of its own, unless `file_mapping` made it;
* importing a library maps files and may start its thread pool: threads that Python does not know are
  compared only if no shared library came along;
* malloc maps and unmaps as it likes: anonymous private mappings are compared with room to spare.
"""

from __future__ import annotations

import gc
import os
import re
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from multiprocessing.process import current_process
from pathlib import Path
from typing import Any

from nbparallel.supervisor.sweep import look
from nbparallel.testing import processes
from nbparallel.testing.processes import ProcessRecord
from nbparallel.wire.locked_names import notebook_of

GRACE_SECONDS = 2.0
"""How long what was released may take to vanish (T_gone: a killed kernel's ranks)."""
POLL_SECONDS = 0.01
"""Between two looks while something is still there; arbitrary."""
ANONYMOUS_SLACK = 256
"""Anonymous mappings that malloc and thread stacks may add in one test; arbitrary."""
STDERR_WORDS = ("leaked", "Exception ignored", "resource_tracker")
"""A test's stderr that holds one of these reports a leak that no assertion found."""
SHARED_NAMES = "/dev/shm"
"""Where named segments and semaphores are (shm_overview(7), sem_overview(7))."""

_MAPPING = re.compile(r"^\S+ (\S{4}) \S+ \S+ \S+\s*(.*)$")

# looking up the member of the enumeration would take 15 µs for each of 64 signals
_handler_of: Callable[[int], object] = getattr(signal, "_signal", signal).getsignal

Drain = Callable[[], None]
_drains: list[Drain] = []


def register_drain(drain: Drain) -> None:
    """Have `drain` called before a difference is called a leak: it empties a pool or a cache."""
    if drain not in _drains:
        _drains.append(drain)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What this process and its tree hold at one moment."""

    pids: frozenset[int]
    """All processes of the machine; the new ones are looked at more closely."""
    names: frozenset[str]
    """Paths of our segments and semaphores, and of multiprocessing's folders for sockets."""
    children: int
    """Page faults of the child processes that have ended: more of them after a test that started one."""
    descriptors: tuple[str, ...]
    """What every open descriptor of this process points to."""
    threads: tuple[str, ...]
    """Names of Python's threads."""
    native_threads: int
    """Number of threads that Python does not know."""
    handlers: frozenset[tuple[int, object]] = frozenset()
    """Signals by number, each with its handler in Python."""
    mappings: Counter[str] = field(default_factory=Counter)
    """Shared and memfd mappings of this process, by name."""
    anonymous: int = 0
    """Number of private mappings without a name."""
    libraries: frozenset[str] = frozenset()
    """Shared libraries that are mapped."""


def footprint() -> Footprint:
    """Return what this process and its tree hold now."""
    mappings, anonymous, libraries = _mappings()
    known = [thread.native_id for thread in threading.enumerate()]
    tasks = os.listdir("/proc/self/task") if processes.HAS_PROC else []
    return Footprint(
        pids=processes.pids(),
        names=_names(),
        children=resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt,
        descriptors=_descriptors(),
        threads=tuple(sorted(thread.name for thread in threading.enumerate())),
        native_threads=sum(int(task) not in known for task in tasks),
        handlers=frozenset((number, _handler_of(number)) for number in map(int, signal.Signals)),
        mappings=mappings,
        anonymous=anonymous,
        libraries=libraries,
    )


def _names() -> frozenset[str]:
    found: set[str] = set()
    for place, prefixes in {SHARED_NAMES: ("nbp", _semaphores()), tempfile.gettempdir(): ("pymp-",)}.items():
        try:
            found.update(f"{place}/{name}" for name in os.listdir(place) if name.startswith(prefixes))
        except FileNotFoundError:
            continue  # macOS has no /dev/shm
    return frozenset(found)


def _semaphores() -> str:
    """Return what the names of this run's semaphores begin with.

    Those of kernels and scripts that a test starts have words of their own, as other programs' have:
    `.ci/run` looks for them at its end.
    """
    this: Any = current_process()
    return f"sem.{this._config['semprefix'][1:]}-"


def _descriptors() -> tuple[str, ...]:
    folder = "/proc/self/fd" if processes.HAS_PROC else "/dev/fd"
    targets = []
    for name in os.listdir(folder):
        try:
            targets.append(os.readlink(f"{folder}/{name}"))
        except OSError:
            if not processes.HAS_PROC and _is_open(int(name)):
                targets.append(f"descriptor {name}")  # macOS: no links there
    return tuple(sorted(targets))


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _mappings() -> tuple[Counter[str], int, frozenset[str]]:
    named: Counter[str] = Counter()
    libraries = set()
    anonymous = 0
    if not processes.HAS_PROC:
        return named, 0, frozenset()
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        found = _MAPPING.match(line)
        if found is None:
            continue
        rights, name = found.groups()
        if not name:
            anonymous += 1
        elif rights.endswith("s") or "memfd:" in name:
            named[name] += 1
        elif ".so" in name:
            libraries.add(name)
    return named, anonymous, frozenset(libraries)


@dataclass(frozen=True, slots=True)
class Leak:
    """One thing that was there after the test and not before."""

    kind: str
    """``process``, ``name``, ``descriptor``, ``mapping``, ``thread``, ``handler``."""
    text: str
    """What it is, for people."""


def difference(before: Footprint, after: Footprint, new_processes: list[ProcessRecord]) -> list[Leak]:
    """Return what `after` holds beyond `before`."""
    leaks = [Leak("process", str(record)) for record in new_processes]
    if names := sorted(after.names - before.names):
        started = after.children != before.children or any(processes.family(os.getpid(), _own_mark()))
        leaks += [Leak("name", path) for path in names if not _is_of_others(path, started=started)]
    extra = len(after.descriptors) - len(before.descriptors)
    fresh = sorted((Counter(after.descriptors) - Counter(before.descriptors)).elements())
    ours = [target for target in fresh if "memfd:nbp" in target]
    if extra > 0 or ours:
        leaks.append(Leak("descriptor", f"{max(extra, len(ours))} more, new ones: {', '.join(fresh)}"))
    leaks += [
        Leak("mapping", f"{count} more of {name}")
        for name, count in (after.mappings - before.mappings).items()
    ]
    if after.anonymous > before.anonymous + ANONYMOUS_SLACK:
        leaks.append(Leak("mapping", f"{after.anonymous - before.anonymous} more without a name"))
    leaks += [Leak("thread", name) for name in (Counter(after.threads) - Counter(before.threads)).elements()]
    native = after.native_threads - before.native_threads
    if native > 0 and after.libraries <= before.libraries:
        leaks.append(Leak("thread", f"{native} that Python did not start"))
    changed = dict(after.handlers - before.handlers)
    leaks += [Leak("handler", f"of {signal.Signals(n).name}: {changed[n]}") for n in sorted(changed)]
    return leaks


def _is_of_others(path: str, *, started: bool) -> bool:
    """Return whether another program has made this name: all of the machine make theirs in one place.

    It has if no process of this run can have: this one has not, and the test has `started` none.  It has as
    well if a living process that is not of this run maps the name or is its notebook.  Semaphores and
    temporary folders are this run's; this process keeps its folder, and one with a socket in use is not left.
    """
    if os.path.isdir(path):
        used = Path("/proc/net/unix").read_text() if processes.HAS_PROC else ""
        own_folder: Any = current_process()
        return path == own_folder._config.get("tempdir") or any(
            f" {socket}\n" in used for socket in Path(path).iterdir()
        )
    if path.startswith(f"{SHARED_NAMES}/sem."):
        return False
    family = {os.getpid(), *(record.pid for record in processes.family(os.getpid(), _own_mark()))}
    notebook = notebook_of(os.path.basename(path))
    if notebook == os.getpid():
        return False
    if notebook and notebook not in family and processes.read(notebook) is not None:
        return True
    if not started:
        return True
    for pid in processes.pids() - family:
        try:
            if path in Path(f"/proc/{pid}/maps").read_text(errors="replace"):
                return True
        except OSError:
            continue  # gone, or another user's
    return False


def _own_mark() -> str:
    return os.environ.get(processes.MARK, "")


class LeakCheck:
    """Compares what this process holds now with what it held when the check was made.

    Notes
    -----
    Processes below one that lived before belong to a longer-lived fixture, which answers for them itself.
    """

    def __init__(self) -> None:
        self._before = footprint()

    def leaked_processes(self) -> list[ProcessRecord]:
        """Return the processes of this run that were not there before, zombies included."""
        new = processes.pids() - self._before.pids
        found = list(processes.family(os.getpid(), _own_mark(), among=new))
        if not found:
            return []
        older = processes.family(os.getpid(), _own_mark(), among=self._before.pids)
        adopted = [record.pid for record in older if record.state != "Z"]
        return list(processes.family(os.getpid(), _own_mark(), among=new, adopted=adopted))

    def leaks(self) -> list[Leak]:
        """Return what is there now beyond what was there before, without waiting."""
        return difference(self._before, footprint(), self.leaked_processes())

    def settle(self, *, grace_seconds: float | None = None, allowed: Container[str] = ()) -> list[Leak]:
        """Collect garbage, empty registered pools, wait a while; return what is still there.

        Kinds that are `allowed` to stay are neither waited for nor returned.
        """
        grace = GRACE_SECONDS * processes.patience() if grace_seconds is None else grace_seconds
        deadline = time.monotonic() + grace
        leaks = [leak for leak in self.leaks() if leak.kind not in allowed]
        while leaks:
            began = time.monotonic()
            gc.collect()
            drain_pools()
            leaks = [leak for leak in self.leaks() if leak.kind not in allowed]
            if not leaks or time.monotonic() > deadline:
                break
            # the processes that have to exit or release need the processor as well
            time.sleep(max(POLL_SECONDS, time.monotonic() - began))
        return leaks

    def end_processes(self) -> None:
        """Kill and reap what the test left running, so that the next one starts clean."""
        left = self.leaked_processes()
        processes.kill(left)
        processes.reap(left)


def drain_pools() -> None:
    """Empty what keeps memory for reuse: registered drains, and this process's store of shared arrays."""
    for drain in _drains:
        drain()
    sharing = sys.modules.get("nbparallel.sharing")
    if sharing is not None:
        sharing.current_store().drain()
        sharing.current_store().trim()


def suspicious_words(text: str) -> list[str]:
    """Return the lines of a stderr that report a leak."""
    return [line for line in text.splitlines() if any(word in line for word in STDERR_WORDS)]


def names_of(notebook: int, places: Iterable[str] | None = None) -> list[str]:
    """Return the paths of all names of a notebook (or script) and its ranks, sorted.

    Parameters
    ----------
    notebook : int
        Its process id.
    places : iterable of path, optional
        Where to look; by default where a sweep does.
    """
    found = look(places).left
    return sorted(name.path for name in found if name.notebook == notebook)
