"""The leak check: what a test must release, and the report of what it did not.

Some facts about counting what a process holds (proc(5), memfd_create(2)):

* ``/proc/self/fd`` shows a memfd as ``/memfd:NAME (deleted)``, and so does ``/proc/self/maps``;
* a `mmap` object of a file keeps a descriptor of its own, unless `file_mapping` made it;
* what malloc maps, and threads that a library starts when it is imported, say nothing of a leak.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from multiprocessing.process import current_process
from pathlib import Path
from typing import Any

from nbparallel.testing import processes
from nbparallel.testing.processes import ProcessRecord
from nbparallel.wire.locked_names import notebook_of

GRACE_SECONDS = 2.0
"""How long what was released may take to vanish (T_gone: a killed kernel's ranks)."""
POLL_SECONDS = 0.01
"""Between two looks while something is still there; arbitrary."""
STDERR_WORDS = ("leaked", "Exception ignored", "resource_tracker")
"""A test's stderr that holds one of these reports a leak that no assertion found."""
SHARED_NAMES = "/dev/shm"
"""Where named segments and semaphores are (shm_overview(7), sem_overview(7))."""

# looking up the member of the enumeration would take 15 µs for each of 64 signals
_handler_of: Callable[[int], object] = getattr(signal, "_signal", signal).getsignal


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
    handlers: frozenset[tuple[int, object]] = frozenset()
    """Signals by number, each with its handler in Python."""
    mappings: Counter[str] = field(default_factory=Counter)
    """Shared and memfd mappings of this process, by name."""


def footprint() -> Footprint:
    """Return what this process and its tree hold now."""
    return Footprint(
        pids=processes.pids(),
        names=_names(),
        children=resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt,
        descriptors=_descriptors(),
        threads=tuple(sorted(thread.name for thread in threading.enumerate())),
        handlers=frozenset((number, _handler_of(number)) for number in map(int, signal.Signals)),
        mappings=_mappings(),
    )


def _names() -> frozenset[str]:
    found: set[str] = set()
    for place, prefixes in {SHARED_NAMES: ("nbp", _semaphores()), tempfile.gettempdir(): ("pymp-",)}.items():
        found.update(f"{place}/{name}" for name in os.listdir(place) if name.startswith(prefixes))
    return frozenset(found)


def _semaphores() -> str:
    """Return what the names of this run's semaphores begin with.

    Those of kernels and scripts that a test starts have words of their own, as other programs' have:
    `.ci/run` looks for them at its end.
    """
    this: Any = current_process()
    return f"sem.{this._config['semprefix'][1:]}-"


def _descriptors() -> tuple[str, ...]:
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself is closed
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    return tuple(sorted(targets))


def _mappings() -> Counter[str]:
    named: Counter[str] = Counter()
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        rights, _, _, _, name = [*line.split(maxsplit=5), ""][1:6]
        if name and (rights.endswith("s") or "memfd:" in name):
            named[name] += 1
    return named


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
    leaks += [Leak("thread", name) for name in (Counter(after.threads) - Counter(before.threads)).elements()]
    changed = dict(after.handlers - before.handlers)
    leaks += [Leak("handler", f"of {signal.Signals(n).name}: {changed[n]}") for n in sorted(changed)]
    return leaks


def _is_of_others(path: str, *, started: bool) -> bool:
    """Return whether another program has made this name: all of the machine make theirs in one place.

    It has if no process of this run can have: this one has not, and the test has `started` none.  It has as
    well if a living process that is not of this run is its notebook.  Semaphores and
    temporary folders are this run's; this process keeps its folder, and one with a socket in use is not left.
    """
    if os.path.isdir(path):
        used = Path("/proc/net/unix").read_text()
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
    return not started


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
    """Empty what keeps memory for reuse: this process's store of shared arrays."""
    sharing = sys.modules.get("nbparallel.sharing")
    if sharing is not None:
        sharing.current_store().drain()
        sharing.current_store().trim()


def suspicious_words(text: str) -> list[str]:
    """Return the lines of a stderr that report a leak."""
    return [line for line in text.splitlines() if any(word in line for word in STDERR_WORDS)]
