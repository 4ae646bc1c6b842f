"""Large private arrays that are moved into arrays of the takers, copied or read where they lie."""

from __future__ import annotations

import itertools
import mmap
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.distributed.collectives import direct, in_place
from nbparallel.distributed.runtime import fault_injection
from nbparallel.distributed.runtime.shared_arrays import decode_handle
from nbparallel.errors import CollectiveMismatchError, NbParallelError
from tests.harness.ranks import context_of

CHUNK = 64 << 10
OPERATIONS = ("all_gather", "gather", "scatter", "all_to_all")


def octets(size: int, source: int, reader: int) -> np.ndarray[Any, Any]:
    """Return bytes of which no two chunks are equal."""
    return ((np.arange(size) + 7 * source + 31 * reader) % 251).astype("u1")


def call_of(
    c: Communicator, operation: str, make: Callable[[int, int], Any], out: list[Any]
) -> Callable[[], Any]:
    """Return a call with a private value for each reader, and buffers for what comes."""
    me, ranks = c.rank, range(c.world_size)
    values = [make(me, reader) for reader in ranks]
    root = c.world_size - 1
    calls: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: c.all_gather(out, make(me, 0)),
        "gather": lambda: c.gather(make(me, root), out if me == root else None, dst=root),
        "scatter": lambda: c.scatter(out[root], values if me == root else None, src=root),
        "all_to_all": lambda: c.all_to_all(out, values),
    }
    return calls[operation]


def check(c: Communicator, operation: str, make: Callable[[int, int], Any], out: list[Any]) -> None:
    """Assert that the buffers hold what they should, and nothing else was written."""
    root = c.world_size - 1
    for source in range(c.world_size):
        expected = make(source, 0 if operation == "all_gather" else c.rank)
        untouched = (operation == "gather" and c.rank != root) or (operation == "scatter" and source != root)
        assert (out[source] == (0 if untouched else expected)).all(), (operation, source)


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=3)
@pytest.mark.time_limit(60)
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_sizes(ranks: Any, monkeypatch: Any, n: int, operation: str) -> None:
    """Sizes around what is read in place, different from rank to rank, arrive."""
    monkeypatch.setattr(in_place, "LEAST_MOVED", 2 * CHUNK)
    sizes = [0, 1, 70_000, CHUNK * 2 - 1, CHUNK * 2, CHUNK * 2 + 1, 7 * CHUNK + 3]

    def work(c: Communicator) -> None:
        for size, _ in itertools.product(sizes, range(3)):

            def make(source: int, reader: int, size: int = size) -> Any:
                return octets(size + 1000 * source + reader if size > 1 else size, source, reader)

            sources = [make(source, 0 if operation == "all_gather" else c.rank) for source in range(n)]
            out = [np.zeros_like(source) for source in sources]
            call_of(c, operation, make, out)()
            check(c, operation, make, out)

    ranks(n, work)


def test_buffers_begin_in_the_middle_of_a_page(ranks: Any, monkeypatch: Any) -> None:
    """Where large arrays begin, 16 bytes behind a page's begin, copies from a page's begin are slow."""
    handles: list[bytes] = []
    offer = direct.KeptBuffer.offer

    def note(self: Any, *arguments: Any) -> bytes:
        handles.append(offer(self, *arguments))
        return handles[-1]

    def work(c: Communicator) -> int:
        monkeypatch.setattr(direct.KeptBuffer, "offer", note)
        c.all_reduce(np.ones(100_000, "u1"))
        buffer = context_of(c).attach(decode_handle(handles[0]), writable=False)
        return int(buffer.__array_interface__["data"][0] % mmap.PAGESIZE)

    assert ranks(2, work) == [direct.MARGIN] * 2
    assert 64 < direct.MARGIN < mmap.PAGESIZE - 64


def test_any_layout(ranks: Any) -> None:
    """Strided and Fortran-ordered buffers and values, structured dtypes, and readers without a buffer."""
    base = octets(12 * 20_000, 1, 1)
    forms = [
        (lambda: np.frombuffer(base.tobytes(), "i4,f8"), lambda x: np.zeros((len(x), 2), x.dtype)[:, 0]),
        (lambda: base.view(">i2").reshape(4, -1), lambda x: np.zeros(x.shape, x.dtype, order="F")),
        (lambda: np.asfortranarray(base.reshape(4, -1)), np.zeros_like),
        (lambda: base[::2], np.zeros_like),
    ]  # fmt: skip

    def work(c: Communicator) -> None:
        for (value, buffer), turn in itertools.product(forms, range(3)):
            x: Any = value()
            out = [buffer(x) for _ in range(3)]
            if turn == 2 and c.rank == 1:  # the others cannot know that
                out = c.all_gather(x)
            else:
                c.all_gather(out, x)
            for got in out:
                assert got.tobytes() == x.tobytes()

    ranks(3, work)


def test_what_does_not_fit_is_not_touched(ranks: Any) -> None:
    """One wrong buffer: all ranks raise before anything is written."""

    def work(c: Communicator) -> None:
        x = octets(3 * CHUNK, c.rank, 0)
        out = [np.zeros_like(x) for _ in range(2)]
        c.all_gather(out, x)
        c.all_gather(out, x)
        wrong = [np.zeros(x.size + (c.rank == 1 and i == 0), "u1") for i in range(2)]
        with pytest.raises(CollectiveMismatchError, match="does not fit"):
            c.all_gather(wrong, x)
        assert not any(array.any() for array in wrong)

    ranks(2, work)


def repeat(c: Communicator, operation: str) -> Any:
    """Call until somebody fails; return whom that blames."""
    size = 5 * CHUNK
    out = [np.zeros(size, "u1") for _ in range(3)]

    def make(source: int, reader: int) -> Any:
        return octets(size, source, reader)

    call = call_of(c, operation, make, out)
    try:
        while True:
            call()
            check(c, operation, make, out)
    except NbParallelError as error:
        for array in out:
            array[...] = 255
        time.sleep(0.02)
        assert all((array == 255).all() for array in out), "a late writer"
        return type(error).__name__, getattr(error, "rank", None)


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.fault("F3")
@pytest.mark.time_limit(60)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_killed_in_the_middle(outcomes: Any, operation: str) -> None:
    """Kill -9, an interrupt or an error in the middle: the others are told who it was."""
    victim = 2  # the root: of the others not all bring something
    for action, nth in (("kill", 5), ("interrupt", 6), ("raise", 7)):
        found = outcomes(3, lambda c: repeat(c, operation), faults=f"half_payload:{victim}:{nth}:{action}")
        if action == "kill":
            assert found[victim].signal == signal.SIGKILL
        else:
            expected = KeyboardInterrupt if action == "interrupt" else fault_injection.FaultInjected
            assert isinstance(found[victim].error, expected), found
        for rank in (0, 1):
            assert found[rank].value == ("PeerFailedError", victim), (action, found)
