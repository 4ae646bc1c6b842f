"""A cell that is prepared and never sent: its names and lines come with the next one."""

from __future__ import annotations

import signal
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nbparallel.errors import ParallelError, UnpicklableError
from nbparallel.session import Session
from nbparallel.session.processes.launch import notebook_colors
from nbparallel.session.tasks.dispatch import TaskDispatcher
from nbparallel.transfer.cell_sources import source_label


def _push(session: Session) -> None:
    session.push(other=1)


def _map(session: Session) -> None:
    session.map(abs, [-1])


def _pull(session: Session) -> None:
    session.pull("kept")


@pytest.mark.slow
def test_names_of_a_cell_that_was_never_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No later task confirms them: ranks get the new value, and names that are new."""
    names: dict[str, Any] = {"x": 1}
    with Session(2) as session:
        session.run("kept = x", namespace=names)
        others: list[Callable[[Session], None]] = [_push, _map, _pull]
        for n, other in enumerate(others, 2):
            names["x"] = names[f"new{n}"] = n
            with monkeypatch.context() as patch:
                patch.setattr(TaskDispatcher, "launch", _interrupted)
                with pytest.raises(KeyboardInterrupt):
                    session.run(f"x, new{n}", namespace=names)
            other(session)
            assert session.run(f"x, new{n}", namespace=names).values == [(n, n)] * 2


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_names_of_another_namespace_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A namespace deletes from the ranks what it had; neither a cell that was sent nor one that was not."""
    one: dict[str, Any] = {"x": 1, "gone": 2}
    other: dict[str, Any] = {"y": 3}
    has = "sorted({'x', 'y', 'gone'} & {*dir()})"
    with Session(1) as session:
        session.run("x, gone", namespace=one)
        with monkeypatch.context() as patch:
            patch.setattr(TaskDispatcher, "launch", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.run("y", namespace=other)
        assert session.run(has, namespace=other).values == [["gone", "x"]]
        assert session.run("y", namespace=other).values == [3]
        assert session.run(has, namespace=other).values == [["gone", "x", "y"]]
        assert session.run("x", namespace=one).values == [1]
        del one["gone"], other["y"]
        assert session.run(has, namespace=one).values == [["x", "y"]]


@pytest.mark.slow
def test_lines_of_a_cell_that_could_not_be_prepared() -> None:
    """What was done for it all the same is said by the next cell, once."""
    names: dict[str, Any] = {"a": np.zeros(4), "gen": (n for n in [1])}
    with Session(1) as session:
        with pytest.raises(UnpicklableError):
            session.run("a, gen", namespace=names, share="a")
        (note,) = session.run("1", namespace=names).notes
        assert note.startswith("ranks may write a from now on")
        assert session.run("1", namespace=names).notes == ()


@pytest.mark.slow
def test_the_line_on_lost_variables_waits_for_a_cell() -> None:
    """A cell that cannot be prepared shows no lines: the next one that runs does."""
    with Session(2) as session:
        with pytest.raises(ParallelError):
            session.run(f"import os\nif rank == 1: os.kill(os.getpid(), {int(signal.SIGKILL)})")
        with pytest.raises(UnpicklableError):
            session.run("gen", namespace={"gen": (n for n in [1])})
        (note,) = session.run("1", namespace={}).notes
        assert "rank 1 was killed by SIGKILL" in note


def test_ipython_half_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may be in the middle of the import."""
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    assert notebook_colors() == "nocolor"
    assert source_label("<cell>") == ""
