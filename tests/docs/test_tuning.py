"""The command that says which constants are best on a machine; and the code names it beside each."""

from __future__ import annotations

import inspect
import time
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.operations import tuning
from benchmarks.operations.knobs import KNOBS, Work


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: knob.name)
def test_every_constant_names_the_command(knob: Any) -> None:
    """Below the constant stands what it was chosen by; all who import it have the same value."""
    module, name = knob.places[0]
    below = inspect.getsource(module).partition(f"\n{name} = ")[2].partition('"""')[2].partition('"""')[0]
    assert "benchmarks.operations.tuning" in below, f"{knob.name}: {below}"
    assert {getattr(m, n) for m, n in knob.places} == {knob.chosen}
    assert len(set(knob.values)) >= 4
    assert min(knob.values) < knob.chosen


def test_values_are_tried_and_put_back(monkeypatch: Any) -> None:
    """In each round all of them; the best has the score 1, and the plateau is what is as good."""
    tried = []
    knob = replace(KNOBS[0], values=(1, 2, 3), works=[Work("one", lambda c: lambda: None)])

    def launch(work: Work, clock: Any) -> float:
        value = knob.chosen
        tried.append(value)
        assert {getattr(m, n) for m, n in knob.places} == {value}
        return {1: 2.0, 2: 1.0, 3: 1.04}.get(value, 4.0) + 0.001 * len(tried)

    monkeypatch.setattr(tuning, "launch", launch)
    chosen = knob.chosen
    times = tuning.measure(knob, 2)
    assert knob.chosen == chosen
    assert sorted(tried) == sorted([1, 2, 3, chosen] * 2)
    found = tuning.scores(times)
    assert min(found, key=lambda value: found[value]) == 2
    assert found[2] == 1
    assert tuning.plateau(found) == [2, 3]


@pytest.mark.parametrize("index", [5, 6, 8])
def test_an_operation_is_timed(monkeypatch: Any, index: int) -> None:
    """Of messages, and of gradients: by ranks that have the value."""
    monkeypatch.setattr(tuning, "SECONDS", 0.0)
    assert 0 < tuning.launch(KNOBS[index].works[0], time.process_time) < 100
