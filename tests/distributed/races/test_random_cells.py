"""Random cells on real ranks: the races that are reported are those of a model, line by line."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from nbparallel.distributed.races import walk
from nbparallel.session import Session
from tests.distributed.races.random_cells import CELLS, RandomCell


@pytest.mark.time_limit(120)
@pytest.mark.parametrize(("ranks", "few"), [(2, 64), (3, 1), (4, 64)])
def test_reported_are_the_races_of_the_model(
    ranks: int,
    few: int,
    sampled: Callable[..., Sequence[int]],
    pytestconfig: pytest.Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of collectives of all ranks and of groups, async ones, and messages in any order, on parts of an array.

    So it is as well if the walk keeps one place of each line and one meeting of two lines.
    """
    monkeypatch.setattr(walk, "FEW", few)
    monkeypatch.setattr(walk, "MOST_MEETINGS", min(few, walk.MOST_MEETINGS))
    first = 1000 * pytestconfig.option.seed
    with Session(ranks) as session:
        for seed in sampled(range(first, first + 200), one_in=20):
            cell = RandomCell(seed, ranks)
            namespace = {"cells": np.zeros(CELLS), "np": np}
            report = session.run(
                cell.source, namespace=namespace, share=["cells"], check_races=True
            ).race_report
            assert report is not None
            assert {frozenset(race.lines) for race in report.races} == cell.races, f"{seed}:\n{cell.source}"
            assert not report.not_checked
