"""How soon a killed worker, producer or root shows: an error, a result, or nothing left of it.

python -m benchmarks.multiprocessing.deaths
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import nbparallel as nbp
import nbparallel.multiprocessing as mp
from benchmarks.multiprocessing.launches import print_rows
from benchmarks.report import Figure, Section, spread

AIM_SECONDS = 1.0
GIVEN_UP_SECONDS = 20.0
NBYTES = 8 << 20
NAMES = Path("/dev/shm")
ROOT = """
import os, time
import nbparallel as nbp, nbparallel.multiprocessing as mp
def wait(queue):
    mine = nbp.ones(8 << 20, "u1", strategy="file_system")
    queue.put((os.getpid(), mine))
    time.sleep(600)
context = mp.get_context("fork")
queue, message = context.Queue(), nbp.ones(8 << 20, "u1", strategy="file_system")
children = [context.Process(target=wait, args=(queue,), daemon=n == 0) for n in range(2)]
for child in children:
    child.start()
kept = [queue.get() for _ in children]
queue.put(message)
print(*(pid for pid, _ in kept), flush=True)
time.sleep(600)
"""
"""Two children with named memory, and a message with memory that no process has taken."""


def _wait(pids: Any) -> None:
    pids.put(os.getpid())
    time.sleep(600)


def _killed_worker() -> float:
    context = mp.get_context("fork")
    pids = context.SimpleQueue()
    with context.Pool(2, initializer=_keep, initargs=(pids,)) as pool:
        task = pool.apply_async(_wait_kept)
        pid = pids.get()
        began = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        try:
            task.get(GIVEN_UP_SECONDS)
        except nbp.WorkerDiedError:
            return time.perf_counter() - began
    raise AssertionError("the task of a killed worker has a result")


def _keep(pids: Any) -> None:
    globals()["kept_pids"] = pids


def _wait_kept() -> None:
    _wait(globals()["kept_pids"])


def _produce(queue: Any, pids: Any) -> None:
    queue.put(np.full(NBYTES, 7, np.uint8))
    _wait(pids)


def _killed_producer() -> float:
    """Return the time from the kill until the message of the dead process is there."""
    context = mp.get_context("fork")
    queue, pids = context.SimpleQueue(), context.SimpleQueue()
    producer = context.Process(target=_produce, args=(queue, pids))
    producer.start()
    pid = pids.get()
    began = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    producer.join()
    array = queue.get()
    seconds = time.perf_counter() - began
    if not (array == 7).all():
        raise AssertionError("another array arrived")
    return seconds


def _hold_writer(writer: Any, pids: Any) -> None:
    _wait(pids)
    writer.close()


def _killed_sender() -> float:
    """Return the time from the kill until a consumer that waits for the dead process has its error."""
    context = mp.get_context("fork")
    pids = context.SimpleQueue()
    reader, writer = context.Pipe(duplex=False)
    producer = context.Process(target=_hold_writer, args=(writer, pids))
    producer.start()
    writer.close()
    pid = pids.get()
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.perf_counter())
        os.kill(pid, signal.SIGKILL)

    threading.Timer(0.1, kill).start()
    try:
        reader.recv()
    except EOFError:
        seconds = time.perf_counter() - killed[0]
        producer.join()
        return seconds
    raise AssertionError("a message of a producer that sent none")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _family(pid: int) -> set[int]:
    """Return the process and its descendants."""
    found = {pid}
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _names() -> set[str]:
    return {name for name in os.listdir(NAMES) if "nbp" in name}


def _killed_root() -> float:
    """Return the time until processes, supervisor (and so memory) and names are gone."""
    before = _names()
    root = subprocess.Popen([sys.executable, "-c", ROOT], stdout=subprocess.PIPE, text=True)
    assert root.stdout is not None
    children = {int(pid) for pid in root.stdout.readline().split()}
    pids, names = _family(root.pid) | children, _names() - before
    if len(children) != 2 or len(names) < 3:
        root.kill()
        raise AssertionError(f"{len(children)} children and {len(names)} names that could go")
    began = time.perf_counter()
    root.kill()
    while (left := [pid for pid in pids if _runs(pid)]) or names & _names():
        if time.perf_counter() - began > GIVEN_UP_SECONDS:
            raise AssertionError(f"processes {left}, names {names & _names()} after {GIVEN_UP_SECONDS} s")
        root.poll()
        time.sleep(0.001)
    seconds = time.perf_counter() - began
    root.wait()
    root.stdout.close()
    return seconds


CASES = {
    "killed worker: the task's error": _killed_worker,
    "killed producer: what it had put": _killed_producer,
    "killed producer: the error of one that waits for it": _killed_sender,
    "killed root: processes, names and memory gone": _killed_root,
}


def run(*, quick: bool) -> Section:
    """Kill them in turns."""
    rounds = 2 if quick else 10
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(rounds):
        for name, call in CASES.items():
            times[name].append(call())
    return Section(
        "Deaths of processes",
        [
            Figure(name, spread(each), aim=f"≤ {AIM_SECONDS:g} s", met=max(each) <= AIM_SECONDS)
            for name, each in times.items()
        ],
        f"From `SIGKILL` on; of {rounds} deaths each all have to meet the aim. The root has two children "
        "with named memory, and a queue with a message that no process has taken. The memory is gone when "
        "the supervisor and all holders are.",
    )


def main() -> None:
    """Print the rows."""
    print_rows(run(quick=True).figures)


if __name__ == "__main__":
    main()
