"""The tools for parallel cells that are measured side by side: how each starts, runs a cell, moves arrays."""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.notebook import START_IPYPARALLEL
from nbparallel.testing import processes
from tests.harness.kernel import Kernel

RANKS = 4
HERE = "print(f'rank {rank} is here')"


@dataclass(frozen=True, slots=True)
class Contender:
    """One tool; every code is a whole cell."""

    name: str
    load: str
    """Imports that neither is measured by."""
    start: str
    """Starts the ranks, which know their number as ``rank`` afterwards."""
    first: str
    """Starts the ranks, each of which prints that it is here."""
    magic: str
    """First line of a parallel cell."""
    inward: str
    """A cell that computes ``found = big + rank`` on all ranks, ``big`` being the notebook's."""
    outward: str
    """A cell that leaves ``back``, a list of every rank's array ``found``."""

    def cell(self, body: str) -> str:
        """Return a cell that runs `body` on all ranks."""
        return f"{self.magic}\n{body}"


NBPARALLEL = Contender(
    name="nbparallel",
    load="%load_ext nbparallel",
    start=f"%%parallel -n {RANKS}\npass",
    first=f"%%parallel -n {RANKS}\n{HERE}",
    magic="%%parallel",
    inward="%%parallel\nfound = big + rank",
    outward="get_ipython().run_cell_magic('parallel', '-o found', 'found')\nback = list(found)",
)
_START_IPYPARALLEL = (
    f"{START_IPYPARALLEL}\nview = client[:]\nview.scatter('rank', range({RANKS}), flatten=True, block=True)"
)
IPYPARALLEL = Contender(
    name="ipyparallel",
    load="import ipyparallel\n%load_ext ipyparallel",
    # what a plot needs, as ipyparallel's documentation says; ours does it by itself
    start=f"{_START_IPYPARALLEL}\n%px %matplotlib inline",
    first=f"{_START_IPYPARALLEL}\n%px {HERE}",
    magic="%%px",
    inward="view.push({'big': big}, block=True)\n%px found = big + rank",
    outward="back = view.pull('found', block=True)",
)


@dataclass(frozen=True, slots=True)
class Started:
    """A kernel with running ranks, and the mark that all their processes carry."""

    kernel: Kernel
    mark: str

    def processes(self) -> list[processes.ProcessRecord]:
        """Return every process that came of this kernel and still runs, wherever it hangs in the tree."""
        found = (processes.read(pid) for pid in processes.pids())
        return [
            process for process in found if process and process.mark == self.mark and process.state != "Z"
        ]


@contextlib.contextmanager
def started(contender: Contender, *, ranks: bool = True) -> Iterator[Started]:
    """Give a fresh kernel with ranks; what is left of it afterwards (by its mark) is ended."""
    mark = f"bench-{uuid.uuid4().hex}"
    with contextlib.ExitStack() as cleanup:
        kernel = Kernel(env={processes.MARK: mark})
        running = Started(kernel, mark)
        cleanup.callback(_end, running)
        cleanup.enter_context(kernel)
        for code in (contender.load, *([contender.start] if ranks else [])):
            outcome = kernel.run(code, timeout=90)
            if outcome.status != "ok":
                raise RuntimeError(f"{contender.name} did not start: {outcome.traceback}")
        yield running


def _end(running: Started) -> None:
    for process in running.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
