"""Arrays of a queue that are kept: they take no descriptors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocessing.programs import run_program

PRELUDE = """
import resource
COUNT, LIMIT, NBYTES = {count}, {limit}, 300_000

def limit():
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

def produce(queue):
    limit()
    for number in range(COUNT):
        queue.put(np.full(NBYTES, number % 251, np.uint8))
    queue.put(None)

def descriptors():
    return len(os.listdir("/proc/self/fd"))

def right(arrays):
    return all((array[[0, -1]] == number % 251).all() for number, array in enumerate(arrays))
"""
KEEP = """
def consume(queue, end):
    limit()
    first, before = queue.get(timeout=60), descriptors()
    kept = [first]
    while (array := queue.get(timeout=60)) is not None:
        kept.append(array)
    end.send((len(kept), descriptors() - before, right(kept)))

queue, (here, there) = ctx.Queue(), ctx.Pipe(duplex=False)
processes = [ctx.Process(target=consume, args=(queue, there)), ctx.Process(target=produce, args=(queue,))]
for process in processes:
    process.start()
there.close()
kept, more, fine = here.recv()
assert (kept, fine) == (COUNT, True), kept
assert more < 10, more
for process in processes:
    process.join(30)
    assert process.exitcode == 0
"""


def run(body: str, folder: Path, method: str, count: int, limit: int) -> None:
    """Run a program with `PRELUDE` before it."""
    run_program(PRELUDE.format(count=count, limit=limit) + body, folder, method, limit=100)


@pytest.mark.time_limit(110)
def test_more_arrays_than_descriptors(tmp_path: Path, method: str) -> None:
    """Producer and consumer may have 128 descriptors; the consumer keeps 300 arrays."""
    run(KEEP, tmp_path, method, 300, 128)


@pytest.mark.slow
@pytest.mark.time_limit(110)
def test_thousands_of_arrays(tmp_path: Path) -> None:
    """Neither limits nor the time of each grow with how many there are."""
    run(KEEP, tmp_path, "fork", 4000, 256)


@pytest.mark.slow
@pytest.mark.time_limit(110)
def test_a_process_that_keeps_many_is_forked(tmp_path: Path) -> None:
    """Its child has them all, also when the parent has dropped its own."""
    body = """
def look(kept, end):
    end.send("started")
    assert end.recv() == "dropped"
    end.send((len(kept), right(kept)))

def consume(queue, end):
    limit()
    kept = [queue.get(timeout=60) for _ in range(COUNT)]
    assert queue.get(timeout=60) is None
    mine, childs = ctx.Pipe()
    process = ctx.Process(target=look, args=(kept, childs))
    process.start()
    assert mine.recv() == "started"
    kept.clear()
    mine.send("dropped")
    end.send(mine.recv())
    process.join(30)

queue, (here, there) = ctx.Queue(), ctx.Pipe(duplex=False)
processes = [ctx.Process(target=consume, args=(queue, there)), ctx.Process(target=produce, args=(queue,))]
for process in processes:
    process.start()
assert here.recv() == (COUNT, True)
for process in processes:
    process.join(30)
    assert process.exitcode == 0
"""
    run(body, tmp_path, "fork", 300, 128)
