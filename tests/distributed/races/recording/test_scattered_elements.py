"""Scattered elements: their order, and the pages on which they lie."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbparallel.distributed.races.access_log import Elements
from nbparallel.distributed.races.recording.unexplained_pages import PAGE, WatchedArrays, runs
from nbparallel.distributed.races.sorted_offsets import distinct
from nbparallel.testing.tiers import examples

OFFSETS = st.lists(st.integers(0, 6 * PAGE), min_size=1, max_size=12)


def _pages(parts: object) -> set[int]:
    return {page for start, stop in parts for page in range(start // PAGE, (stop - 1) // PAGE + 1)}  # type: ignore[attr-defined]


@settings(max_examples=examples(100), deadline=None)
@given(OFFSETS, st.sampled_from([1, 8, 16, PAGE + 8]))
def test_pages_of_elements(offsets: list[int], itemsize: int) -> None:
    """All pages that an element touches, and no other."""
    ordered = distinct(np.array(offsets, np.int64))
    assert ordered.tolist() == sorted(set(offsets))
    region = Elements(itemsize, ordered.tobytes())
    assert _pages(runs(region)) == _pages((at, at + itemsize) for at in offsets)


def test_many_elements_are_few_parts() -> None:
    """A million elements beside each other are looked at as one part: one by one they took a second."""
    region = Elements(8, np.arange(0, 1_000_000, 16, dtype=np.int64).tobytes())
    assert list(runs(region)) == [(0, 999_992)]


def test_arrays_on_one_page_are_one_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of them was written is not known: the report names both, with `or`."""
    memory = np.frombuffer(mmap.mmap(-1, 3 * PAGE), np.uint8)
    first, second, other = memory[8:16], memory[64:80], memory[PAGE : 2 * PAGE]
    watched = WatchedArrays({(1, 8): first, (1, 64): second, (1, PAGE): other})
    start = memory.__array_interface__["data"][0]
    monkeypatch.setattr(watched.watch, "written", lambda: [(start, PAGE)])
    assert watched.unexplained([]) == [(1, 8, 80)]
