"""The conformance suite and random programs where nearly every array is large: each of its ways."""

from __future__ import annotations

from typing import Any

import pytest

from nbparallel.distributed import Communicator
from nbparallel.distributed.collectives import direct, in_place
from nbparallel.distributed.runtime import peer_memory
from nbparallel.distributed.slots import slot_area
from nbparallel.wire.control_layout import Layout
from tests.distributed.collectives.test_in_place import count_reads
from tests.distributed.collectives.test_many_collectives import mixed
from tests.distributed.conformance.test_conformance import call_all

SLOT = 1 << 10
"""Bytes that a slot holds here: arrays of 300 elements are large, and the suite takes no longer than ever."""
MIXED = (
    "private", "strided", "backwards", "fortran", "private", "backwards", "shared", "shared strided",
)  # fmt: skip
"""Neighbours' arrays: what four ranks bring is all private three times of eight, else mixed."""
LAYOUTS = {"read in place": MIXED, "copied": MIXED, "shared": ("shared",)}


@pytest.fixture(autouse=True, params=LAYOUTS)
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return how large private arrays travel; they are small here, and so are all steps.

    Ranks are forked and inherit that.
    """
    of = Layout.of
    monkeypatch.setattr(Layout, "of", staticmethod(lambda size: of(size)._replace(slot_payload=SLOT)))
    monkeypatch.setattr(slot_area, "group_payload", lambda _: SLOT)
    for constant in [name for name in vars(in_place) if name.startswith("LEAST_")]:
        monkeypatch.setattr(in_place, constant, 0)
    for module, constant, nbytes in (
        (in_place, "BLOCK", 1_000), (in_place, "PIECE", 1_500), (direct, "PIECE", 4 << 10),
    ):  # fmt: skip
        monkeypatch.setattr(module, constant, nbytes)
    if request.param != "read in place":
        monkeypatch.setenv(peer_memory.OFF, "0")
    return request.param


def check_reads(way: str, calls: int, reads: int) -> None:
    """Assert that others' memory was read, or was not."""
    assert (reads > calls / 4) if way == "read in place" else (reads == 0), (way, calls, reads)


@pytest.mark.matrix(cover=(), size=1)
@pytest.mark.slow
@pytest.mark.time_limit(600)
@pytest.mark.parametrize(("n", "one_of", "first", "least"), [(2, 1, 0, 1500), (3, 3, 1, 500), (4, 3, 2, 500)])
def test_every_collective(ranks: Any, way: str, n: int, one_of: int, first: int, least: int) -> None:
    """Collective × operator × dtype × kind of group × root; a third of it with three and four ranks."""

    def work(c: Communicator) -> tuple[int, int]:
        seen = count_reads(c)
        return call_all(c, one_of, first, LAYOUTS[way]), len(seen)

    for cases, reads in ranks(n, work, seconds=500):
        assert cases >= least
        check_reads(way, cases, reads)


@pytest.mark.stress
@pytest.mark.once
@pytest.mark.time_limit(3600)
@pytest.mark.parametrize("n", [3, 4])
def test_every_collective_whole(ranks: Any, way: str, n: int) -> None:
    """All of it with three and four ranks."""
    assert min(ranks(n, lambda c: call_all(c, layouts=LAYOUTS[way]), seconds=3000)) > 1900


@pytest.mark.matrix(cover=(), size=1)
@pytest.mark.slow
@pytest.mark.time_limit(120)
@pytest.mark.parametrize(("n", "seed", "count"), [(2, 11, 1500), (3, 12, 1000), (4, 13, 600)])
def test_random_programs(ranks: Any, way: str, n: int, seed: int, count: int) -> None:
    """Random correct programs, in groups as well, with shared and private arrays beside each other."""

    def work(c: Communicator) -> tuple[int, int]:
        seen = count_reads(c)
        return mixed(c, count, seed, LAYOUTS[way]), len(seen)

    for done, reads in ranks(n, work, seconds=100):
        assert done == count
        check_reads(way, count, reads)
