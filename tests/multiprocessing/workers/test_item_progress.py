"""The live panel of a pool: how far its items are, and which workers have which."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nbparallel import multiprocessing as ours
from nbparallel.testing.waiting import wait_until
from nbparallel_magics.views.panel import now
from nbparallel_widgets.panel_view import PanelView


class Notebook:
    """One without ranks, as a panel looks at it."""

    session = None
    pool: Any = None


def hold(gate: Path, item: int) -> int:
    """Return the item, those from 4 on when the gate is there."""
    if item >= 4:
        wait_until(gate.exists)
    return item


def _by_apply(pool: Any, function: Any, items: Any) -> list[Any]:
    return [asked.get() for asked in [pool.apply_async(function, (item,)) for item in items]]


def _by_joblib(function: Any, items: Any) -> Any:
    joblib = pytest.importorskip("joblib")
    ours.register_joblib()
    with joblib.parallel_config(backend="nbparallel", n_jobs=2):
        return joblib.Parallel(batch_size=1)([joblib.delayed(function)(item) for item in items])


def _by(make: Any, use: Callable[..., Any], function: Any, items: Any) -> list[Any]:
    with make(2) as pool:
        return list(use(pool, function, items))


WAYS: dict[str, Callable[..., Any]] = {
    "map": partial(_by, ours.Pool, lambda pool, *given: pool.map(*given, chunksize=1)),
    "chunks": partial(_by, ours.Pool, lambda pool, *given: pool.map(*given, chunksize=2)),
    "imap": partial(_by, ours.Pool, lambda pool, *given: pool.imap_unordered(*given)),
    "apply_async": partial(_by, ours.Pool, _by_apply),
    "executor": partial(_by, ours.Executor, lambda pool, *given: pool.map(*given)),
    "executor, chunks": partial(_by, ours.Executor, lambda pool, *given: pool.map(*given, chunksize=2)),
    "joblib": _by_joblib,
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_the_panel_shows_items_of_a_pool(way: str, tmp_path: Path) -> None:
    """How many of how many are done, which worker has which, and afterwards that all are."""
    notebook: Any = Notebook()
    gate, done = tmp_path / "gate", []
    call = threading.Thread(target=lambda: done.extend(WAYS[way](partial(hold, gate), range(8))))
    call.start()
    try:
        wait_until(lambda: "4 of 8 items done" in repr(PanelView(now(notebook))))
        held = {"4", "6" if "chunks" in way else "5"}
        wait_until(lambda: set(re.findall(r"item (\d)", repr(PanelView(now(notebook))))) == held)
        assert ">worker 1<" in PanelView(now(notebook)).figures_bundle()["text/html"]
    finally:
        gate.touch()
        call.join()
    assert sorted(done) == list(range(8))
    assert repr(PanelView(now(notebook))).startswith("8 of 8 items done\nthe last call finished after ")


def test_a_length_that_is_unknown_is_not_guessed(tmp_path: Path) -> None:
    """Of a generator the panel says how many are done."""
    notebook: Any = Notebook()
    go_on = threading.Event()

    def items() -> Any:
        yield from range(4)
        go_on.wait()

    with ours.Pool(2) as pool:
        results = pool.imap(partial(hold, tmp_path), items())
        assert [next(results) for _ in range(4)] == [0, 1, 2, 3]
        shown = PanelView(now(notebook))
        go_on.set()
        assert list(results) == []
    assert repr(shown).startswith("4 items done\na call runs")
    assert "nbp-done" not in shown.figures_bundle()["text/html"]
