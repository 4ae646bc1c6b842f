"""The system call sweep: kill at, and fail, every system call of create → share → send → free.

`strace` is attached to one thread of a running session and counts from there, so that the N-th call of a kind
is the same one each time.  First the calls are recorded; then each is made the last one (SIGKILL), or fails.

    python -m tests.faults.sweep.syscall_sweep [--strategies NAME …] [--victims NAME …] [--every N] [--from N]

Some facts (strace(1), ptrace(2)):

* ``inject=NAME:…:when=N`` counts the calls of that name of that thread from the attachment on; the signal is
  there before the call is made, so killing at call N + 1 is what killing right after call N would be;
* a call that is made to fail is not made at all: ``close`` and ``munmap``, which do their work whatever they
  return, are therefore only killed at;
* a traced process that is stopped may still be killed, and `strace` ends with it.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.faults.sweep.syscall_notebook import HungError, Notebook

STRATEGIES = ("file_descriptor", "file_system", "file_region", "mmap")
VICTIMS = ("notebook", "pump", "supervisor", "rank 0", "rank 1")
"""The notebook's main thread, the thread of it that reads, and the single threads of the others."""
ERRORS = {
    "memfd_create": ("ENOMEM", "EMFILE", "EPERM"),
    "ftruncate": ("EINTR", "ENOSPC", "EPERM"),
    "fallocate": ("EINTR", "ENOSPC", "ENOMEM", "EPERM"),
    "pwrite64": ("EINTR", "ENOSPC"),
    "mmap": ("ENOMEM", "EPERM"),
    "madvise": ("ENOMEM", "EPERM"),
    "openat": ("EMFILE", "ENOMEM", "EINTR", "ENOSPC", "EPERM"),
    "dup": ("EMFILE",),
    "fcntl": ("EMFILE", "EPERM"),
    "fchmod": ("EINTR", "EPERM"),
    "newfstatat": ("ENOMEM",),
    "statfs": ("EINTR", "ENOMEM"),
    "sendmsg": ("EINTR", "ENOMEM", "EPERM"),
    "sendto": ("EINTR", "ENOMEM", "EPERM"),
    "recvmsg": ("EINTR", "ENOMEM"),
    "unlink": ("EPERM",),
    "poll": ("EINTR", "ENOMEM"),
    "futex": ("EINTR",),
    "close": (),
    "munmap": (),
}
"""Calls that have to do with memory, descriptors, names and messages, and how each may fail."""
_CALL = re.compile(r"^(?:\S+ )?(\w+)\(")


@dataclass(frozen=True, slots=True)
class Point:
    """One thing to do to one system call."""

    strategy: str
    victim: str
    call: str
    number: int
    """Which call of this name, from 1."""
    action: str
    """``SIGKILL`` or an error's name."""

    def __str__(self) -> str:
        return f"{self.strategy}, {self.victim}: {self.call} no. {self.number} {self.action}"

    @property
    def inject(self) -> str:
        """As `strace` wants it."""
        what = "signal=SIGKILL" if self.action == "SIGKILL" else f"error={self.action}"
        return f"{self.call}:{what}:when={self.number}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it."""

    point: Point
    kind: str
    """``not reached``, ``no effect``, ``error``, ``ended``; or what must not be: ``hang``, ``leak``,
    ``foreign error``, ``broken``."""
    text: str = ""
    """Which error, or what is wrong."""

    @property
    def bad(self) -> bool:
        """Whether this must not be."""
        return self.kind in ("hang", "leak", "foreign error", "broken")


class Tracer:
    """One `strace` on one thread."""

    def __init__(self, thread: int, *expressions: str) -> None:
        self._log = tempfile.NamedTemporaryFile("r", prefix="nbp-strace-")  # noqa: SIM115  closed in `end`
        words = ["strace", "-o", self._log.name, "-p", str(thread)]
        for expression in expressions:
            words += ["-e", expression]
        self._popen = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True)
        assert self._popen.stderr is not None
        said = self._popen.stderr.readline()
        if "attached" not in said:
            self.end()
            raise RuntimeError(f"strace says: {said.strip()}")

    def end(self) -> list[str]:
        """Detach; return the lines of the trace."""
        try:
            self._popen.send_signal(signal.SIGINT)
            self._popen.communicate(timeout=20)
        finally:
            self._popen.kill()
            self._popen.wait()
            lines = self._log.read().splitlines()
            self._log.close()
        return lines


def missing_reason() -> str | None:
    """Return why calls cannot be injected into here, or None."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    done = subprocess.run(
        ["strace", "-e", "trace=none", "-e", "inject=getppid:error=EPERM", "true"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    return None if done.returncode == 0 else f"strace cannot inject here: {done.stderr.strip()[-200:]}"


def record(notebook: Notebook, strategy: str, victim: str) -> list[Point]:
    """Run the workload once; return all that can be done to the calls that one thread makes."""
    notebook.check()  # as every attempt finds it: nothing is pooled
    tracer = Tracer(notebook.people()[victim], f"trace={','.join(ERRORS)}")
    try:
        notebook.work()
    finally:
        lines = tracer.end()
    calls = collections.Counter(found[1] for line in lines if (found := _CALL.match(line)))
    return [
        Point(strategy, victim, call, number, action)
        for call, count in sorted(calls.items())
        for number in range(1, count + 1)
        for action in ("SIGKILL", *_errors(call, victim))
    ]


def _errors(call: str, victim: str) -> tuple[str, ...]:
    """Return how a call may fail.

    The notebook's threads wake each other by futex for the interpreter's lock; a wake never fails, and one
    that is made to hangs Python itself.
    """
    return () if call == "futex" and victim in ("notebook", "pump") else ERRORS[call]


def attempt(notebook: Notebook, point: Point) -> Outcome:
    """Do it, and look at what came of it; after anything bad the notebook has to be replaced."""
    tracer = Tracer(notebook.people()[point.victim], f"trace={point.call}", f"inject={point.inject}")
    said = None
    try:
        said = notebook.work()
    except EOFError:
        pass  # killed, or so bad that it ended
    except HungError as error:
        return Outcome(point, "hang", str(error))
    finally:
        lines = tracer.end()
    killed = point.action == "SIGKILL" and any("killed by SIGKILL" in line for line in lines)
    reached = killed or any("(INJECTED)" in line for line in lines)
    if killed and point.victim in ("notebook", "pump"):  # it may have answered before that call came
        return _ended(notebook, point)
    if said is None:
        return Outcome(point, "broken", f"the notebook ended: {notebook.last_words()}")
    return _judge(notebook, point, said, reached=reached)


def _ended(notebook: Notebook, point: Point) -> Outcome:
    left = notebook.left_behind()
    return Outcome(point, "leak" if left else "ended", left)


def _judge(notebook: Notebook, point: Point, said: dict[str, str], *, reached: bool) -> Outcome:
    try:
        found = notebook.check()
        if found["more"] and point.call == "unlink":
            # A record that could not be removed goes with the next name that does.
            notebook.work()
            found = notebook.check()
    except EOFError as error:
        if point.action == "SIGKILL" and notebook.killed:
            # It answered, and the call came while strace was detaching: the log lacks the line.
            return _ended(notebook, point)
        return Outcome(point, "broken", f"afterwards: {error}")
    except HungError as error:
        return Outcome(point, "hang", f"afterwards: {error}")
    if "broken" in found:
        return Outcome(point, "broken", f"afterwards: {found['broken']}; before: {said['text']}")
    more = found["more"]
    if more:
        return Outcome(point, "leak", f"{more} {found['names']} after {said['text'] or 'no error'}")
    if said["foreign"] and not _from_python_itself(point, said["foreign"]):
        return Outcome(point, "foreign error", said["foreign"])
    if not reached:
        return Outcome(point, "not reached")
    return Outcome(point, "error" if said["error"] else "no effect", said["error"])


def _from_python_itself(point: Point, text: str) -> bool:
    """Tell whether the interpreter was refused its own memory: MemoryError may come from any line then."""
    return point.call == "mmap" and text.startswith("MemoryError:")


def sweep(points: dict[tuple[str, str], list[Point]], *, every: int = 1, first: int = 0) -> Iterator[Outcome]:
    """Attempt every `every`-th point from number `first` on; a fresh notebook for each strategy."""
    for strategy in dict.fromkeys(strategy for strategy, _ in points):
        notebook = None
        chosen = [p for key, found in points.items() if key[0] == strategy for p in found][first::every]
        try:
            for point in chosen:
                if notebook is None or not notebook.alive:
                    notebook = Notebook(strategy)
                outcome = attempt(notebook, point)
                yield outcome
                if outcome.bad or outcome.kind == "ended":
                    notebook.end()
                    notebook = None
        finally:
            if notebook is not None:
                notebook.end()


def record_all(
    strategies: tuple[str, ...] = STRATEGIES, victims: tuple[str, ...] = VICTIMS
) -> dict[tuple[str, str], list[Point]]:
    """Record the calls of each thread for each strategy."""
    points = {}
    for strategy in strategies:
        notebook = Notebook(strategy)
        try:
            for victim in victims:
                points[strategy, victim] = record(notebook, strategy, victim)
        finally:
            notebook.end()
    return points


def main() -> int:
    """Sweep, print what is bad as it comes, then what came of all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=VICTIMS)
    parser.add_argument("--every", type=int, default=1, help="attempt every N-th point only")
    parser.add_argument("--first", type=int, default=0, help="beginning with this one")
    parser.add_argument("--log", type=Path, help="write every outcome there")
    options = parser.parse_args()
    reason = missing_reason()
    if reason is not None:
        print(f"SKIPPED the system call sweep: {reason}")
        return 0
    points = record_all(tuple(options.strategies), tuple(options.victims))
    total = sum(len(found[options.first :: options.every]) for found in points.values())
    print(f"about {total} points", flush=True)
    started, outcomes = time.monotonic(), []
    for outcome in sweep(points, every=options.every, first=options.first):
        outcomes.append(outcome)
        if options.log:
            with options.log.open("a") as log:
                log.write(f"{outcome.kind:14} {outcome.point}: {outcome.text}\n")
        if outcome.bad:
            print(f"{outcome.kind.upper()}: {outcome.point}: {outcome.text}", flush=True)
    counts = collections.Counter((o.point.strategy, o.point.victim, o.kind) for o in outcomes)
    print(*(f"{', '.join(key)}: {count}" for key, count in counts.items()), sep="\n")
    print(f"{len(outcomes)} points in {time.monotonic() - started:.0f} s")
    return 1 if any(outcome.bad for outcome in outcomes) else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", os.pathsep.join(sys.path))
    sys.exit(main())
