"""F38: one array as source and target, overlapping parts: numpy's result, or an error before anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from tests.harness.ranks import context_of

OPERATIONS = (
    "all_gather_into_tensor", "all_gather", "reduce_scatter_tensor", "reduce_scatter", "scatter", "gather",
    "all_to_all_single", "all_to_all", "reduce", "send and recv",
)  # fmt: skip


def overlapping(
    c: Communicator, name: str, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], starts: tuple[int, int],
    size: int,
) -> None:  # fmt: skip
    """Call it with parts of `x`; `y` becomes what numpy makes of all ranks' first content."""
    n, me = c.world_size, c.rank
    a, b = starts
    everybody = c.all_gather(x)
    small, large = x[a : a + size], x[b : b + n * size]
    if name in ("scatter", "reduce_scatter", "all_to_all"):
        rows = [large[r * size : (r + 1) * size] for r in range(n)]
    brought = [v[a : a + size].copy() for v in everybody]
    wide = [v[b : b + n * size].copy() for v in everybody]
    part = slice(me * size, (me + 1) * size)
    if name == "all_gather_into_tensor":
        c.all_gather_into_tensor(large, small)
        y[b : b + n * size] = np.concatenate(brought)
    elif name == "all_gather":
        c.all_gather(list(large.reshape(n, size)), small)
        y[b : b + n * size] = np.concatenate(brought)
    elif name == "gather":
        c.gather(small, list(large.reshape(n, size)) if me == 0 else None, dst=0)
        if me == 0:
            y[b : b + n * size] = np.concatenate(brought)
    elif name == "reduce_scatter_tensor":
        c.reduce_scatter_tensor(small, large)
        y[a : a + size] = sum(wide)[part]
    elif name == "reduce_scatter":
        c.reduce_scatter(small, rows)
        y[a : a + size] = sum(wide)[part]
    elif name == "scatter":
        c.scatter(small, rows if me == n - 1 else None, src=n - 1)
        y[a : a + size] = wide[n - 1][part]
    elif name == "all_to_all_single":
        c.all_to_all_single(x[a : a + n * size], large)
        y[a : a + n * size] = np.concatenate([v[part] for v in wide])
    elif name == "all_to_all":
        c.all_to_all(list(x[a : a + n * size].reshape(n, size)), rows)
        y[a : a + n * size] = np.concatenate([v[part] for v in wide])
    elif name == "reduce":
        c.reduce(small, 0)
        if me == 0:
            y[a : a + size] = sum(brought)
    else:
        c.send(small, (me + 1) % n)
        c.recv(x[b : b + size], src=(me - 1) % n)
        y[b : b + size] = brought[(me - 1) % n]


@pytest.mark.slow
@pytest.mark.fault("F38")
@pytest.mark.time_limit(600)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_overlapping_parts_of_one_array(ranks: Any, n: int) -> None:
    """Sources and targets that overlap by any offset, private and shared: as if the source were a copy."""

    def work(c: Communicator) -> list[str]:
        rng, refused = np.random.default_rng(n), []
        for turn in range(150):
            name = OPERATIONS[turn % len(OPERATIONS)]
            size = int(rng.choice([1, 5, 700, 9000], p=[0.3, 0.3, 0.3, 0.1]))
            room = 2 * n * size + 3
            starts = tuple(int(v) for v in rng.integers(0, room - n * size, 2))
            x = np.arange(room, dtype="f8") * (c.rank + 1)
            if turn // len(OPERATIONS) % 2:
                x = context_of(c).store.share(x)
            y = x.copy()
            try:
                overlapping(c, name, x, y, (starts[0], starts[1]), size)
            except ValueError as error:
                refused.append(str(error))
            assert np.array_equal(x, y), (turn, name, size, starts)
        return refused

    for refused in ranks(n, work, seconds=500):
        assert len(refused) < 50
        assert all("memory" in text for text in refused), refused


@pytest.mark.fault("F38")
def test_targets_over_each_other_are_refused(ranks: Any) -> None:
    """Two buffers of one call that share memory: ValueError on the caller, nothing sent, nothing written."""

    def work(c: Communicator) -> None:
        for make in (np.array, context_of(c).store.share):
            x = make(np.arange(8.0))
            for call in (
                lambda x=x: c.all_gather([x[:3], x[2:5]], x[5:]),
                lambda x=x: c.gather(x[5:], [x[:3], x[:3]], dst=c.rank),
                lambda x=x: c.all_to_all([x[:4], x[3:7]], [x[:4], x[4:]]),
                lambda x=x: c.average_gradients([x[:5], x[4:]]),
            ):
                with pytest.raises(ValueError, match="share memory"):
                    call()
            assert np.array_equal(x, np.arange(8.0))
        c.barrier()

    ranks(2, work)


@pytest.mark.fault("F38")
@pytest.mark.parametrize("size", [6, 3000, 60_000])
def test_one_shared_array_on_several_ranks(ranks: Any, size: int) -> None:
    """What one rank fills and another one has as well raises on all, untouched; parts of their own work."""

    def work(c: Communicator) -> None:
        store, me, x = context_of(c).store, c.rank, np.ones(size)
        whole = store.share(np.ones(4 * size))
        handle = c.broadcast(store.handle(whole, writable=True) if me == 0 else None)
        if me:
            whole = store.attach(handle, writable=True)
        rows = [whole[r * size : (r + 1) * size] for r in range(3)]
        half, part = whole[me * size // 2 :][:size], rows[me]
        frozen = whole.view()
        frozen.flags.writeable = False
        for call in (
            lambda: c.all_reduce(half),
            lambda: c.scan(half),
            lambda: c.exscan(half),
            lambda: c.reduce(whole, 0),
            lambda: c.reduce_scatter(rows[0], [x] * 3),
            lambda: c.reduce_scatter(part, whole[: 3 * size]),
            lambda: c.all_gather(rows, x),
            lambda: c.scatter(rows[0], [x] * 3 if me == 0 else None),
            lambda: c.average_gradients([x.copy(), half]),
        ):
            with pytest.raises(ValueError, match=r"ranks 0 and \d passed overlapping memory"):
                call()
            assert (whole == 1).all()
        assert (c.reduce_scatter(whole) == 3).all()
        assert all((view == whole).all() for view in c.all_gather(whole))
        found = c.reduce(frozen if me else np.ones(4 * size), 0)
        assert found is None or (found == 3).all()
        c.barrier()
        for fill, wanted in (
            (lambda: c.scan(part), me + 1),
            (lambda: c.average_gradients(part), 2),
            (lambda: c.scatter(part, [x * 5] * 3 if me == 0 else None), 5),
            (lambda: c.all_reduce(part), 15),
        ):
            fill()
            assert (part == wanted).all()
        c.barrier()

    ranks(3, work)
