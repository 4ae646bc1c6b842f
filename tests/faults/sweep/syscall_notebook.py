"""Notebook: the process that the system call sweep works on, and what is left of it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from nbparallel.testing import processes
from nbparallel.testing.waiting import wait_until
from tests.harness.sandboxes import missing_reason, on_small_tmpfs
from tests.harness.watchdog import dump_and_kill

ANSWER_SECONDS = 40.0
"""A hang's bound; the workload takes 50 ms, its repair after a death half a second."""
GONE_SECONDS = 10.0
"""By then everything of a killed notebook has to be gone; the promise is 2 s on a quiet machine."""


class HungError(RuntimeError):
    """No answer within the bound; the stacks are in the text."""


class Notebook:
    """``syscall_workload`` in a process of its own, with /dev/shm to itself where possible."""

    def __init__(self, strategy: str) -> None:
        self.strategy = strategy
        self._folder = tempfile.TemporaryDirectory(prefix="nbp-sweep-")
        self._words = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in `end`
        # Other runs on this machine have names in /dev/shm as well.
        own = missing_reason() is None
        if strategy == "file_system" and not own:
            raise RuntimeError("the sweep of file_system needs a /dev/shm of its own: unshare -Urm")
        place = "/dev/shm" if strategy == "file_system" else self._folder.name
        words = [sys.executable, "-m", "tests.faults.sweep.syscall_workload", strategy, place]
        self._popen = subprocess.Popen(
            [*(on_small_tmpfs("/dev/shm", "64m") if own else ()), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            text=True,
            bufsize=1,
        )
        self.sessions: set[str] = set()
        try:
            self.people()
        except (EOFError, HungError):
            text = self.last_words()
            self.end()
            raise RuntimeError(f"the sweep's notebook does not start: {text}") from None
        # Seen from outside its mount namespace, also after its death.
        self._place = os.open(f"/proc/{self._popen.pid}/root{place}", os.O_PATH | os.O_CLOEXEC)

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._popen.poll() is None

    @property
    def killed(self) -> bool:
        """Whether its process was ended by SIGKILL."""
        return self._popen.wait(GONE_SECONDS) == -signal.SIGKILL

    def people(self) -> dict[str, int]:
        """Return the number of each process, and of the thread that reads."""
        found: dict[str, int] = self._ask("people")
        record = processes.read(found["supervisor"])
        if record is not None and record.session:
            self.sessions.add(record.session)
        return found

    def work(self) -> dict[str, str]:
        """Run the workload; return what came of it."""
        answer: dict[str, str] = self._ask("work")
        return answer

    def check(self) -> dict[str, Any]:
        """Free everything; return what there is more of than in the beginning."""
        answer: dict[str, Any] = self._ask("check")
        return answer

    def _ask(self, word: str) -> Any:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        try:
            self._popen.stdin.write(word + "\n")
        except BrokenPipeError:
            raise EOFError from None
        if not select.select([self._popen.stdout], [], [], ANSWER_SECONDS)[0]:
            raise HungError(f"no answer to {word!r} within {ANSWER_SECONDS} s:\n{self._dump()}")
        line = self._popen.stdout.readline()
        if not line:
            self._popen.wait(GONE_SECONDS)
            raise EOFError(f"the notebook ended with {self._popen.returncode}: {self.last_words()}")
        return json.loads(line)

    def _dump(self) -> str:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._popen.pid, signal.SIGUSR1)  # its faulthandler writes where each thread is
        time.sleep(0.5)
        with tempfile.TemporaryFile("w+") as stacks:
            dump_and_kill(self._family(), stacks)
            stacks.seek(0)
            return stacks.read() + self.last_words(6000)

    def last_words(self, count: int = 1500) -> str:
        """Return the end of what it wrote on stderr."""
        self._words.flush()
        size = os.fstat(self._words.fileno()).st_size
        return os.pread(self._words.fileno(), count, max(0, size - count)).decode(errors="replace")

    def _family(self) -> list[processes.ProcessRecord]:
        found = (processes.read(pid) for pid in processes.pids())
        return [record for record in found if record is not None and record.session in self.sessions]

    def names(self) -> list[str]:
        """Return the names of ours where its segments have theirs."""
        return [name for name in os.listdir(f"/proc/self/fd/{self._place}") if name.startswith("nbp")]

    def left_behind(self) -> str:
        """Wait until everything of a notebook that was killed is gone; return what is not."""
        try:
            wait_until(lambda: not (self._family() or self.names()), seconds=GONE_SECONDS)
        except AssertionError:
            return f"{[str(record) for record in self._family()]} {self.names()}"
        return ""

    def end(self) -> None:
        """End its processes and remove what it had."""
        with contextlib.suppress(BrokenPipeError):
            if self._popen.stdin is not None:
                self._popen.stdin.close()
        try:
            self._popen.wait(5)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        if self._popen.stdout is not None:
            self._popen.stdout.close()
        if self.sessions:
            processes.kill(self._family())
        if hasattr(self, "_place"):
            os.close(self._place)
        self._words.close()
        self._folder.cleanup()
