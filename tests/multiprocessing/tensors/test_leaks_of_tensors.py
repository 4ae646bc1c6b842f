"""torch's own cases of sharing, many times each with every strategy and start method: nothing adds up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocessing.programs import run_program
from tests.sharing.tensors.optional import needs_torch

STRATEGIES = ("file_descriptor", "file_system", "file_region", "mmap", "copy")
ROUNDS = {"fork": 30, "forkserver": 30, "spawn": 10}
"""With spawn every process imports torch: ten rounds take the time of thirty by the other methods."""
SECONDS = 1750
"""A watchdog: 128 processes a test, each with torch; 550 s were too few beside other programs."""
LONG = (pytest.mark.stress, pytest.mark.slow, pytest.mark.time_limit(SECONDS + 50))
CASES = """
import gc
import torch
torch.set_num_threads(1)
from nbparallel.multiprocessing import household
from nbparallel.sharing import current_store

mp.set_sharing_strategy({strategy!r})
{method!r} == "forkserver" and mp.set_forkserver_preload(["torch"])
shares = {strategy!r} != "copy"

def share(tensor):
    return nbp.share(tensor) if shares else tensor  # the strategy has no shared memory

def fill(inbox, outbox):
    whole, part = inbox.get()
    part[:] = 5
    whole[0] += 2
    outbox.put((whole, part))
    outbox.put(whole)
    for _ in range(2):
        storage, x, y, column = inbox.get()
        assert x[0, 0] == 4 or not shares
        y += 1
        column += 1
        outbox.put((storage, x, y, column))
    for x in (torch.zeros(0), torch.zeros(0, 3), torch.tensor(2.0)):
        got = inbox.get()
        assert got.shape == x.shape and torch.equal(got, x)
        outbox.put(got)

def sharing(inbox, outbox, nelements):
    x = share(torch.zeros(nelements // 5, 5))
    inbox.put((x, x[:, 1]))
    whole, part = outbox.get(timeout=60)
    again = outbox.get(timeout=60)
    assert (x[0, 0], x[1, 1]) == ((2, 5) if shares else (0, 0)), x
    assert again[0, 0] == 2
    assert not shares or (whole.data_ptr() == again.data_ptr() == x.data_ptr())
    assert not shares or part.data_ptr() == whole[:, 1].data_ptr()

def preserve(inbox, outbox, nelements):
    x = share(torch.full((nelements // 5, 5), 4.0))
    for base in (x, x.clone()):
        inbox.put([base.view(-1), base, base[2], base[:, 1]])
        flat, whole, row, column = outbox.get(timeout=60)
        assert whole[2, 1] == 6, whole  # both views are of its storage
        assert not shares or flat.data_ptr() == whole.data_ptr() == row.data_ptr() - 2 * 5 * 4

def empty(inbox, outbox):
    for x in (torch.zeros(0), torch.zeros(0, 3), torch.tensor(2.0)):
        inbox.put(x)
        assert torch.equal(outbox.get(timeout=60), x)

def set_to(x, value):
    x.fill_(value)
    return x

def pooled(nelements):
    with ctx.Pool(2) as pool:
        given = [share(torch.zeros(nelements)) for _ in range(4)]
        results = pool.starmap(set_to, [(x, 5.0) for x in given])
        assert all((x == 5).all() for x in results)
        assert not shares or all((x == 5).all() for x in given)

def inherit(nelements):
    x = share(torch.zeros(nelements))
    process = ctx.Process(target=set_to, args=(x, 3.0))
    process.start()
    process.join()
    assert process.exitcode == 0 and (x == 3).all() == shares

def once(nelements):
    inbox, outbox = ctx.Queue(), ctx.Queue()
    process = ctx.Process(target=fill, args=(inbox, outbox), daemon=True)  # a failed test ends
    process.start()
    sharing(inbox, outbox, nelements)
    preserve(inbox, outbox, nelements)
    empty(inbox, outbox)
    process.join()
    assert process.exitcode == 0
    for queue in (inbox, outbox):
        queue.close()
        queue.join_thread()
    pooled(nelements)
    inherit(nelements)

def held():
    gc.collect()
    current_store().trim()
    report = household.report()
    unread = sum(row.messages for row in report.segments)
    return unread, len(report.processes), len(report.segments), len(os.listdir("/proc/self/fd"))

def settle(limit):
    "Wait until no more is held than `limit`; return what is."
    deadline = time.monotonic() + 10
    while True:
        now = held()
        if all(a <= b for a, b in zip(now, limit)):
            return now
        assert time.monotonic() < deadline, ("messages, processes, segments, descriptors", now, limit)
        time.sleep(0.01)

for nelements in (20, 100_000):
    once(nelements)
_, _, segments, descriptors = settle((0, 0, 9, 60))
for repeat in range({repeats}):
    once((20, 100_000)[repeat % 2])
    # a large array lies alone, small ones together: a few more or fewer, but not some more with each round
    settle((0, 0, segments + 3, descriptors + 5))
"""


@needs_torch
@pytest.mark.matrix(cover=(), size=2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("repeats", "start"),
    [
        pytest.param(6, "fork", marks=pytest.mark.slow),
        *(pytest.param(rounds, method, marks=LONG) for method, rounds in ROUNDS.items()),
    ],
)
def test_nothing_adds_up(tmp_path: Path, start: str, repeats: int, strategy: str) -> None:
    """Segments, messages, processes, names and descriptors are as many after all rounds as after one."""
    program = CASES.format(strategy=strategy, method=start, repeats=repeats)
    run_program(program, tmp_path, start, limit=SECONDS)
