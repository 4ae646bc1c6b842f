"""The notebook of the system call sweep: create → share → send → free with two ranks, on command.

Run as ``python -m tests.faults.sweep.syscall_workload STRATEGY FOLDER``; reads a word a line, answers with
JSON. Everything that may be injected into lies in `work`; what is imported late is imported by its first run.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import signal
import sys
import threading
from typing import Any

import numpy as np

import nbparallel as nbp
from nbparallel.errors import NbParallelError, ParallelError
from nbparallel.sharing import current_store
from nbparallel.testing.waiting import wait_until

SHARE = """
import numpy as np, nbparallel as nbp
assert float(x.sum()) == 12_497_500 and not x.flags.writeable
y[rank] = 1 + rank
"""
SEND = """
import numpy as np, nbparallel as nbp
mine = nbp.share(np.full(3000, rank + 1.0))
if rank == 0:
    send(mine, 1, view=True)
    got = recv(src=1)
else:
    got = recv(src=0)
    send(mine, 0, view=True)
assert got.sum() == 3000 * (2 - rank), got
copied = np.ones(40_000)
all_reduce(copied)
assert copied[-1] == 2
"""
TIDY = """
import gc, sys
from nbparallel.sharing import current_store
for name in ("x", "y", "mine", "got", "copied"):
    globals().pop(name, None)
sys.last_value = sys.last_exc = sys.last_traceback = None
gc.collect()
current_store().drain()
current_store().trim()
assert all_reduce(rank) == 1
"""


def work(session: nbp.Session) -> None:
    """Create, share, send and free arrays."""
    names: dict[str, Any] = {"x": np.arange(5000.0)}
    names["y"] = nbp.zeros(300_000, "u1")
    session.run(SHARE, namespace=names)
    assert names["y"][:2].tolist() == [1, 2]
    session.run(SEND)
    y = names.pop("y")
    assert y[1] == 2
    del y
    names.clear()
    session.run("mine = got = copied = None", namespace=names)
    current_store().drain()


def outcome(session: nbp.Session) -> dict[str, Any]:
    """Return what came of `work`."""
    try:
        work(session)
    except ParallelError as error:
        kinds = [type(each).__name__ for each in error.errors.values()]
        foreign = [
            f"{type(each).__name__}: {each}"
            for each in error.errors.values()
            if not isinstance(each, NbParallelError)
        ]
        return {"error": " + ".join(sorted(set(kinds))), "foreign": "; ".join(foreign), "text": str(error)}
    except BaseException as error:  # noqa: BLE001  whatever it is, it is the answer
        foreign = "" if isinstance(error, NbParallelError) else f"{type(error).__name__}: {error}"
        return {"error": type(error).__name__, "foreign": foreign, "text": str(error)}
    return {"error": "", "foreign": "", "text": ""}


def held(session: nbp.Session, folder: str) -> dict[str, Any]:
    """Free everything; return what each process holds, and which names there are."""
    sys.last_value = sys.last_traceback = None  # type: ignore[assignment]
    gc.collect()
    session.run(TIDY, namespace={})
    current_store().drain()
    current_store().trim()
    counts = {name: _descriptors(pid) for name, pid in people(session).items() if name != "pump"}
    counts["segments"] = len(nbp.segments())
    return {"counts": counts, "names": [name for name in os.listdir(folder) if name.startswith("nbp")]}


def people(session: nbp.Session) -> dict[str, int]:
    """Return the number of every process, and of the thread that reads."""
    said = session.statistics()
    event_loop = next((t.native_id for t in threading.enumerate() if t.name.startswith("nbparallel-")), 0)
    found = {"notebook": os.getpid(), "pump": event_loop or 0, "supervisor": said.supervisor_pid or 0}
    found.update({f"rank {rank.rank}": rank.pid or 0 for rank in said.ranks})
    return found


def _descriptors(pid: int) -> int:
    try:
        mapped = sum("memfd:nbp" in line or "/nbp_" in line for line in open(f"/proc/{pid}/maps"))  # noqa: SIM115
        return len(os.listdir(f"/proc/{pid}/fd")) + mapped
    except OSError:
        return 0


def main(strategy: str, folder: str) -> None:
    """Answer commands until the input ends."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    nbp.set_sharing_strategy(strategy, **({"directory": folder} if strategy == "mmap" else {}))
    with nbp.Session(2) as session:
        for _ in range(3):
            work(session)
            least = held(session, folder)
        for line in sys.stdin:
            answer: dict[str, Any] = {}
            try:
                if line == "people\n":
                    answer = people(session)
                elif line == "work\n":
                    answer = outcome(session)
                elif line == "check\n":
                    # What others let go of is heard of a moment after the cell in which they did.
                    try:
                        answer = held(session, folder)
                    except NbParallelError:  # the group ended, and that was its last word
                        answer = held(session, folder)
                    with contextlib.suppress(AssertionError):
                        wait_until(lambda: not _more(held(session, folder), least), seconds=3.0)
                    answer = held(session, folder)
                    answer["more"] = _more(answer, least)
            except BaseException as error:  # noqa: BLE001  the sweep judges
                answer = {"broken": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)


def _more(now: dict[str, Any], least: dict[str, Any]) -> dict[str, int]:
    """Return what is there beyond the beginning."""
    extra = {name: count - least["counts"].get(name, 0) for name, count in now["counts"].items()}
    extra["names"] = len(now["names"])
    return {name: count for name, count in extra.items() if count > 0}


if __name__ == "__main__":
    main(*sys.argv[1:])
