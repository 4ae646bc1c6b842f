"""Training over hosts: averages of gradients, equal data, batches: as with as many ranks on one machine."""

from __future__ import annotations

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.errors import CollectiveMismatchError, ParallelError

pytestmark = pytest.mark.time_limit(60)
CELL = """
g = [np.full(3, rank, float), np.full((2, 2), 10.0 * rank), np.zeros(0), np.arange(200_000.0)[::2] * rank]
dist.average_gradients(g)
weighted, bare = np.full(4, rank + 0.5), np.array([1.0 if rank else np.nan])
dist.average_gradients({"a": weighted}, weight=rank)
dist.average_gradients(bare, weight=bool(rank))
dist.assert_same([g, weighted, bare])
batches = [batch.tolist() for batch in dist.batches(np.arange(50.0), batch_size=5, epoch=1, shuffle=True)]
[x.tolist() for x in (*g, weighted, bare)], batches
"""


@pytest.mark.slow
def test_a_training_loop_is_the_same_on_hosts(hosts: nbp.Session) -> None:
    """Averages with and without weights, of arrays of any layout; every sample is in one batch."""
    with nbp.Session(4) as here:
        expected = here.run(CELL, namespace={"np": np}).values
    assert hosts.run(CELL, namespace={"np": np}).values == expected
    samples = [x for _, batches in expected for batch in batches for x in batch]
    assert sorted(samples) == list(range(50))


@pytest.mark.slow
def test_one_large_array_is_averaged_where_it_lies(hosts: nbp.Session) -> None:
    """In place, and every rank has the same bits."""
    cell = """
x = np.random.default_rng(rank).normal(size=300_000).astype(np.float32)
same = dist.average_gradients([x])[0] is x
dist.assert_same(x)
same, x[:1000]
"""
    found = hosts.run(cell, namespace={"np": np}).values
    each = [np.random.default_rng(r).normal(size=300_000).astype(np.float32)[:1000] for r in range(4)]
    assert all(same for same, _ in found)
    np.testing.assert_allclose(found[0][1], np.mean(each, axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        ("dist.average_gradients([np.zeros(3 + rank // 3)])", "CollectiveMismatchError"),
        (
            "dist.average_gradients([np.zeros(3)], weight=None if rank == 3 else 1)",
            r"rank 3 \(host b\) did not",
        ),
        (
            "dist.batches(np.zeros(9), batch_size=1 + rank // 2, epoch=0)",
            r"ranks 2-3 \(host b\) passed batch_size=2",
        ),
        ("dist.assert_same(rank // 3)", r"rank 3 \(host b\) differs"),
    ],
)
def test_ranks_that_differ_are_named(hosts: nbp.Session, cell: str, text: str) -> None:
    """With their hosts, on all ranks; the next cell works."""
    with pytest.raises(ParallelError, match=text) as caught:
        hosts.run(cell, namespace={"np": np})
    assert len(caught.value.errors) == 4
    assert hosts.run("all_reduce(1)").values == [4] * 4


def test_what_was_not_called_by_all_is_named(hosts: nbp.Session) -> None:
    """As of every operation."""
    with pytest.raises(ParallelError) as caught:
        hosts.run("if rank != 3: dist.average_gradients([np.zeros(3)])", namespace={"np": np})
    errors = caught.value.errors.values()
    assert any(isinstance(error, CollectiveMismatchError) and "3 (host b)" in str(error) for error in errors)


def test_inside_a_host_group_nothing_crosses(hosts: nbp.Session) -> None:
    """Each host has its own average."""
    cell = "x = np.full(2, float(rank))\ndist.average_gradients(x, group=dist.host_group())\nfloat(x[0])"
    assert hosts.run(cell, namespace={"np": np}).values == [0.5, 0.5, 2.5, 2.5]
