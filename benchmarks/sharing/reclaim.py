"""How soon the shared memory of a dead rank is gone: its names, and the descriptors that keep its pages."""

from __future__ import annotations

import os
import signal
import time

import nbparallel as nbp
from benchmarks.report import Figure, Section, spread
from tests.harness.stores import names_of

SIGNALS = ("SIGKILL", "SIGTERM", "SIGSEGV", "SIGABRT", "SIGBUS")
STRATEGIES = ("file_descriptor", "file_system", "mmap")
NBYTES = 8 << 20
AIM_SECONDS = 1.0
GIVEN_UP_SECONDS = 10.0
MAKE = f"mine = [nbp.ones({NBYTES}, 'u1', strategy=s) for s in {STRATEGIES}]"
SHOW = "for n in range(3): recv(src=1) if rank == 0 else send(mine[n], 0, view=True)"


def _kept(supervisor: int, rank: int) -> bool:
    """Return whether the supervisor keeps memory without a name that this rank made."""
    for fd in os.listdir(f"/proc/{supervisor}/fd"):
        try:
            if os.readlink(f"/proc/{supervisor}/fd/{fd}").startswith(f"/memfd:nbp-{rank} "):
                return True
        except OSError:
            continue  # closed since it was listed
    return False


def seconds_until_gone(session: nbp.Session, name: str) -> float:
    """Kill rank 1, which has an array of every strategy that rank 0 once had; return how long they stay."""
    before = set(names_of(os.getpid()))
    session.run(MAKE, namespace={"nbp": nbp}, ranks=[1])
    session.run(SHOW)
    seen = session.statistics()
    supervisor, rank = seen.supervisor_pid, seen.ranks[1].pid
    if len(set(names_of(os.getpid())) - before) < 2 or not _kept(supervisor, rank):
        raise AssertionError("nothing is there that could go")
    started = time.perf_counter()
    os.kill(rank, getattr(signal, name))
    while set(names_of(os.getpid())) - before or _kept(supervisor, rank):
        if time.perf_counter() - started > GIVEN_UP_SECONDS:
            raise AssertionError(f"{set(names_of(os.getpid())) - before} after {GIVEN_UP_SECONDS} s")
        time.sleep(0.0005)
    return time.perf_counter() - started


def run(*, quick: bool) -> Section:
    """Kill rank after rank, by each signal in turn; the others and the notebook live on."""
    rounds = 3 if quick else 20
    times: dict[str, list[float]] = {name: [] for name in SIGNALS}
    with nbp.Session(2) as session:
        for _ in range(rounds):
            for name in SIGNALS:
                times[name].append(seconds_until_gone(session, name))
    return Section(
        "The shared memory of a dead rank",
        [
            Figure(name, spread(each), aim=f"≤ {AIM_SECONDS:g} s", met=max(each) <= AIM_SECONDS)
            for name, each in times.items()
        ],
        f"From the signal until names and memory are gone of what a rank had made: {NBYTES >> 20} MiB with "
        f"each of {', '.join(f'`{s}`' for s in STRATEGIES)}, which another rank had held. Of {rounds} deaths "
        "each all have to meet the aim. torch leaves the names as long as the notebook lives.",
    )
