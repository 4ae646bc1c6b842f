"""Reading in place in a session: turned off for it, refused by the system, and refused in the middle."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess

import pytest

from nbparallel.errors import PeerFailedError
from nbparallel.session import Session
from nbparallel.session.tasks.parallel_error import ParallelError
from tests.harness import sandboxes

SETUP = """
import numpy as np
import nbparallel.distributed as dist
from nbparallel.distributed.runtime import peer_memory
from nbparallel.distributed.runtime.peer_memory import read_memory
x = np.ones(1 << 21)
reads = 0
def counted(*arguments):
    global reads
    reads += 1
    return read_memory(*arguments)
peer_memory.read_memory = counted
"""
GATHER = "assert len(dist.all_gather([np.empty_like(x) for _ in range(world_size)], x)) == world_size"
REDUCE = "x[...] = 1\ndist.all_reduce(x)\nassert (x == world_size).all()\nreads"
SCRIPT = f"""
from nbparallel.session import Session
with Session(2) as session:
    session.run({SETUP!r})
    for _ in range(2):
        print(session.run({REDUCE!r}).values)
"""

FAILING = """
import nbparallel as nbp
with nbp.Session(2) as session:
    session.run("import numpy as np; x = np.ones(1 << 21)")
    try:
        session.run("all_reduce(x)")
    except nbp.errors.ParallelError as error:
        bad = any(isinstance(e, OSError) and "read_in_place" in str(e) for e in error.errors.values())
    print(bad, session.run("x[...] = 1; float(all_reduce(x)[-1])").values)
"""


def test_a_session_turns_it_off_and_on() -> None:
    """The attribute holds from the next cell on."""
    with Session(2, read_in_place=False) as session:
        session.run(SETUP)
        for _ in range(3):
            session.run(GATHER)  # in which a receiver would try whether it can read the sender's memory
        assert session.run(REDUCE).values == [0, 0]
        session.read_in_place = True
        counts = session.run(REDUCE).values
        assert all(counts)
        session.read_in_place = False
        assert session.run(REDUCE).values == counts


GROWTH = """
import numpy as np
import nbparallel.distributed as dist
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
x, part = np.ones(1 << 20), np.ones(1 << 18)
dist.barrier()
before = peak()
for _ in range(3):
    CALL
peak() - before
"""
"""What a rank's largest resident memory grows by, in KiB."""


@pytest.mark.slow
@pytest.mark.parametrize("call", ["dist.all_reduce(x)", "dist.reduce_scatter_tensor(part, x)"])
def test_a_rank_needs_less_memory(call: str) -> None:
    """It needs two blocks to combine with; staged, its chunks and those of the others."""
    grown = {}
    for on in (True, False):
        with Session(4, read_in_place=on) as session:
            grown[on] = session.run(GROWTH.replace("CALL", call)).values
    assert max(grown[True]) + (1 << 10) < min(grown[False]), grown


BROKEN = """
import ctypes, mmap, tempfile
n = 1 << 20
good = np.ones(n, np.uint8)
out = [np.empty(n, np.uint8) for _ in range(2)] if rank == 0 else None
def from_a_hole():
    pages = np.frombuffer(mmap.mmap(-1, n), np.uint8)
    hole = ctypes.c_void_p(pages.ctypes.data + n // 2)
    protect = ctypes.CDLL(None).mprotect
    try:
        assert rank == 0 or protect(hole, 4096, 0) == 0  # PROT_NONE
        dist.gather(pages, out)
    finally:
        protect(hole, 4096, mmap.PROT_READ | mmap.PROT_WRITE)
def into_a_shorter_file():
    with tempfile.TemporaryFile() as file:
        file.truncate(2 * n)
        rows = np.memmap(file, np.uint8, "r+", shape=(2, n))
        file.truncate(n)
        dist.gather(good, list(rows) if rank == 0 else None)
for _ in range(3):
    dist.gather(good, out)
"""


@pytest.mark.slow
@pytest.mark.fault("F18")
@pytest.mark.parametrize(
    ("call", "text"),
    [("from_a_hole", "reading an array of rank 1"), ("into_a_shorter_file", "could not fill an array")],
)
def test_memory_that_is_gone_turns_nothing_off(call: str, text: str) -> None:
    """An array whose memory cannot be read, or filled, ends its cell; other arrays are read as before."""
    with Session(2) as session:
        session.run(SETUP)
        counts = session.run(REDUCE).values
        session.run(BROKEN)
        with pytest.raises(ParallelError) as caught:
            session.run(f"{call}()")
        error = caught.value.errors[0]
        assert isinstance(error, OSError)
        assert error.errno == errno.EFAULT
        assert text in str(error)
        assert "was a mapped file made shorter?" in str(error)
        assert "read_in_place" not in str(error)
        assert isinstance(caught.value.errors[1], PeerFailedError)
        session.run("reads = 0")
        assert session.run(REDUCE).values == counts


def refusing(refusal: str) -> list[str]:
    """Return the words before a command that make the system refuse it to read others' memory."""
    if shutil.which("strace") is None:
        pytest.skip("there is no strace")
    words = ["strace", "-f", "-qq", "-o", os.devnull, "--seccomp-bpf", "-e", "trace=process_vm_readv"]
    words += ["-e", f"inject=process_vm_readv:error={refusal}"]
    probe = subprocess.run([*words, "true"], capture_output=True, text=True, timeout=20, check=False)
    if probe.returncode:
        pytest.skip(f"strace may not trace here: {probe.stderr.strip()}")
    return words


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=1)
@pytest.mark.parametrize("refusal", ["EPERM", "ENOSYS", "EFAULT"])
def test_a_system_that_refuses(refusal: str) -> None:
    """Nothing is said, results are right, and after the first try nobody tries again."""
    if shutil.which("strace") is None:
        pytest.skip("there is no strace")
    done = sandboxes.run_script(SCRIPT, refusing(refusal))
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout == "[1, 1]\n[1, 1]\n"


@pytest.mark.slow
@pytest.mark.fault("F18")
@pytest.mark.matrix(cover=(), size=1)
@pytest.mark.parametrize("refusal", ["EPERM", "ENOSYS", "EFAULT"])
def test_a_system_that_refuses_in_the_middle(refusal: str) -> None:
    """A cell fails, with the system's reason and what to do; those that follow are right."""
    done = sandboxes.run_script(FAILING, refusing(f"{refusal}:when=3+"))
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout == "True [2.0, 2.0]\n", done


@pytest.mark.slow
def test_an_environment_that_turns_it_off() -> None:
    """A script's ranks follow the variable."""
    done = sandboxes.run_script(SCRIPT, ["env", "NBP_READ_IN_PLACE=0"])
    assert done.stdout == "[0, 0]\n[0, 0]\n", done


LATE = """
x = np.full(1 << 21, rank + 7.0)
def move():
    if operation == "scatter":
        dist.scatter(x, [np.full(1 << 21, 7.0)] * 3 if rank == 0 else None)
    else:
        dist.broadcast(x)
    assert (x == 7).all()
move()
move()
if rank == 2:
    from tests.harness.ranks import context_of
    from nbparallel.testing.waiting import wait_until
    peers = context_of(dist.current()).peers
    def late(*arguments):
        wait_until(lambda: peers.has_failed(1))
        return read_memory(*arguments)
    peer_memory.read_memory = late
move()
assert rank != 1, "behind the call"
"""


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["scatter", "broadcast"])
def test_a_rank_that_fails_behind_the_call_ends_no_other_one(operation: str) -> None:
    """In a cell that goes on, what was read of one rank counts although another one has failed since."""
    with Session(3) as session:
        session.push(operation=operation)
        session.run(SETUP)
        with pytest.raises(ParallelError) as caught:
            session.run(LATE, on_error="continue")
    assert {rank: str(error) for rank, error in caught.value.errors.items()} == {1: "behind the call"}
