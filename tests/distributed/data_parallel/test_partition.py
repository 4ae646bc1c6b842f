"""Who gets which samples: each exactly once, on as many batches on every rank; without processes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings, strategies as st

from nbparallel.distributed.api.data_parallel import BatchSchedule
from nbparallel.distributed.arguments import part_of
from tests.harness.tiers import examples

plans = st.builds(
    BatchSchedule,
    samples=st.integers(0, 200),
    batch_size=st.integers(1, 40),
    epoch=st.integers(0, 2**40),
    seed=st.integers(0, 2**130),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)


@given(st.integers(0, 1000), st.integers(1, 20))
def test_parts_are_those_of_array_split(n: int, parts: int) -> None:
    """Parts follow each other, and the first are longer by one, as numpy splits."""
    want = np.array_split(np.arange(n), parts)
    assert [np.arange(n)[part_of(n, i, parts)].tolist() for i in range(parts)] == [w.tolist() for w in want]


@given(plans, st.integers(1, 9))
@settings(max_examples=examples(300), deadline=None)
def test_each_sample_exactly_once(plan: BatchSchedule, parts: int) -> None:
    """Together the ranks see every sample once (with drop_last: none twice), in equally many batches."""
    all_parts = [plan.of_part(part, parts) for part in range(parts)]
    steps = plan.steps(parts)
    assert {len(part) for part in all_parts} == {steps}
    seen = [int(i) for part in all_parts for batch in part for i in batch]
    assert len(set(seen)) == len(seen)
    together = parts * plan.batch_size
    left_out = plan.samples % together if plan.drop_last else 0
    assert len(seen) == plan.samples - left_out
    for step in range(steps):
        sizes = [len(part[step]) for part in all_parts]
        full = (step + 1) * together <= plan.samples
        assert set(sizes) == {plan.batch_size} if full else max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)
    order = [int(i) for step in range(steps) for part in all_parts for i in part[step]]
    assert order == plan.order()[: len(order)].tolist()
    if not plan.shuffle:
        assert order == list(range(len(order)))


@given(plans)
@settings(deadline=None)
def test_the_order_follows_from_seed_and_epoch(plan: BatchSchedule) -> None:
    """The same plan gives the same order, another epoch or seed another one."""
    plan = replace(plan, samples=200, shuffle=True)
    assert (plan.order() == replace(plan).order()).all()
    others = [replace(plan, epoch=plan.epoch + 1), replace(plan, seed=plan.seed + 1)]
    others.append(replace(plan, epoch=plan.seed + 1, seed=plan.epoch))
    for other in others:
        if other != plan:
            assert (plan.order() != other.order()).any()
