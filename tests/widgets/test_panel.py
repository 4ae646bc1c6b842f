"""The live panel: when it looks, what it sends, and that its thread ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from nbparallel.errors import NO_RANKS
from nbparallel.session.monitoring.activity import SessionActivity
from nbparallel.session.monitoring.segments import SharedSegment
from nbparallel.testing.waiting import wait_until
from nbparallel_widgets import panel as panels
from nbparallel_widgets.panel import Panel
from tests.widgets.activities import DONE, SEGMENTS, STRAGGLER


class Scene:
    """What the panel looks at, and how often it did."""

    def __init__(self) -> None:
        self.now: SessionActivity | None = None
        self.error: Exception | None = None
        self.looks = self.surveys = 0
        self.cost = 0.0  # seconds of processor time

    def look(self) -> SessionActivity | None:
        """Look."""
        self.looks += 1
        until = time.thread_time() + self.cost
        while time.thread_time() < until:
            pass
        if self.error is not None:
            raise self.error
        return self.now

    def survey(self) -> Sequence[SharedSegment] | None:
        """Return the segments."""
        self.surveys += 1
        return SEGMENTS if self.now is not None else None


class Outputs:
    """A notebook's outputs by name, as they are now, and what was sent."""

    def __init__(self) -> None:
        self.now: dict[str, dict[str, str]] = {}
        self.sent: list[str] = []

    def display(self, data: dict[str, Any], metadata: dict[str, Any], transient: dict[str, Any]) -> None:
        """Show an output."""
        self.now[transient["display_id"].rpartition("-")[2]] = data

    def update(self, data: dict[str, Any], metadata: dict[str, Any], transient: dict[str, Any]) -> None:
        """Replace one."""
        name = transient["display_id"].rpartition("-")[2]
        assert name in self.now
        self.now[name] = data
        self.sent.append(name)

    @property
    def figures(self) -> str:
        """The text that changes while a cell runs."""
        return self.now["figures"]["text/plain"]


@pytest.fixture
def scene() -> Scene:
    """Return what a panel can look at."""
    return Scene()


@pytest.fixture
def outputs() -> Outputs:
    """Return where a panel is shown."""
    return Outputs()


@pytest.fixture
def panel(scene: Scene, outputs: Outputs, monkeypatch: pytest.MonkeyPatch) -> Iterator[Panel]:
    """Return a panel that looks often and has been shown."""
    monkeypatch.setattr(panels, "INTERVAL", 0.01)
    monkeypatch.setattr(panels.time, "strftime", lambda _: "17:31:54")  # else it is news each second
    made = Panel(scene.look, scene.survey, outputs)
    made.show(outputs)
    yield made
    made.close()
    assert not any(thread.name == "nbparallel-panel" for thread in threading.enumerate())


@pytest.mark.slow
def test_it_looks_only_while_something_runs(panel: Panel, scene: Scene, outputs: Outputs) -> None:
    """While the notebook or ranks run something it follows; then it sleeps, and nothing is sent twice."""
    assert list(outputs.now) == ["figures", "folds", "folded"]
    assert NO_RANKS in outputs.figures
    looks = scene.looks
    time.sleep(0.1)
    assert scene.looks == looks
    panel.begin(outputs)
    wait_until(lambda: scene.looks > looks + 3)
    scene.now = STRAGGLER
    wait_until(lambda: "rank 2 holds the others up" in outputs.figures)
    panel.end()  # the ranks go on: a cell with --async
    before = scene.looks
    wait_until(lambda: scene.looks > before + 3)
    outputs.sent.clear()
    before = scene.looks
    wait_until(lambda: scene.looks > before + 3)
    assert outputs.sent == []
    scene.now = DONE
    wait_until(lambda: "In[3] finished after 2.0 s" in outputs.figures)
    time.sleep(0.1)
    before = scene.looks
    time.sleep(0.1)
    assert scene.looks == before


def test_the_end_of_a_cell_is_shown_before_it_is_reported(
    panel: Panel, scene: Scene, outputs: Outputs
) -> None:
    """When `end` returns, the cell's last state has been sent: a program that saves the page now has it."""
    scene.now = STRAGGLER
    panel.begin(outputs)
    scene.now = DONE
    panel.end()
    assert "In[3] finished after 2.0 s" in outputs.figures
    assert "data, x" in outputs.now["folded"]["text/plain"]


def test_the_text_of_a_cell_that_runs_is_its_sentence(panel: Panel, scene: Scene, outputs: Outputs) -> None:
    """While a cell runs, the text beside the HTML is two lines; its end brings the table."""
    scene.now = STRAGGLER
    panel.begin(outputs)
    wait_until(lambda: "rank 2 holds the others up" in outputs.figures)
    assert outputs.figures.splitlines()[1:] == ["as of 17:31:54"]
    assert "nbp-ranks" in outputs.now["figures"]["text/html"]
    scene.now = DONE
    panel.end()
    assert "own memory" in outputs.figures


def test_what_a_user_opens_is_not_replaced(panel: Panel, scene: Scene, outputs: Outputs) -> None:
    """The folds are sent once; what they open is renewed when a cell ends, not while it runs."""
    scene.now = STRAGGLER
    panel.begin(outputs)
    wait_until(lambda: "rank 2 holds the others up" in outputs.figures)
    scene.now = replace(STRAGGLER, seconds=9.0)
    wait_until(lambda: outputs.sent.count("figures") >= 2)
    assert set(outputs.sent) == {"figures"}
    before = scene.surveys
    scene.now = DONE
    panel.end()
    assert scene.surveys > before
    assert "folds" not in outputs.sent
    assert "folded" in outputs.sent


def test_the_thread_does_not_wait_for_an_array(panel: Panel, scene: Scene, outputs: Outputs) -> None:
    """While an array moves into shared memory, a survey would wait for it: only figures are looked at."""
    scene.now = DONE
    panel.begin(outputs)
    wait_until(lambda: "In[3] finished after 2.0 s" in outputs.figures)
    before = scene.surveys
    scene.now = replace(DONE, phase="moving", moving_name="data", moving_nbytes=1 << 30)
    wait_until(lambda: "moving 1.0 GiB of `data`" in outputs.figures)
    assert scene.surveys == before
    panel.end()
    assert scene.surveys > before


def test_ranks_that_were_stopped(panel: Panel, scene: Scene, outputs: Outputs) -> None:
    """When the ranks are gone, it still shows what they did last, and says that they were stopped."""
    scene.now = DONE
    panel.begin(outputs)
    panel.end()
    scene.now = None
    panel.begin(outputs)
    panel.end()
    advice = "%parallel_panel shows the next ones"
    assert outputs.figures.startswith(
        f"(the ranks were stopped; this is what they did last; {advice})\nrank 2 held the others up"
    )
    assert "data, x" in outputs.now["folded"]["text/plain"]


def test_closing_while_a_cell_runs(panel: Panel, scene: Scene, outputs: Outputs) -> None:
    """What stays does not claim that news are missing."""
    scene.now = STRAGGLER
    panel.begin(outputs)
    wait_until(lambda: "no news" in outputs.now["figures"]["text/html"], "figures of the cell")
    panel.close()
    assert "no news" not in outputs.now["figures"]["text/html"]


def test_closing(panel: Panel, scene: Scene, outputs: Outputs) -> None:
    """What was shown stays where it was shown, without the words on how to close it; again is fine."""
    assert "--close" in outputs.now["folds"]["text/html"]
    assert "Create New View for Cell Output" in outputs.now["folds"]["text/plain"]
    scene.now = DONE
    panel.close()
    panel.close()
    assert "In[3] finished after 2.0 s" in outputs.figures
    assert "--close" not in outputs.now["folds"]["text/html"]


def test_nothing_is_sent_at_exit(panel: Panel, scene: Scene, outputs: Outputs) -> None:
    """At the kernel's end the thread ends, and nothing is sent any more."""
    scene.now = DONE
    panel.close(leave=False)
    panel.end()
    assert outputs.sent == []


def test_an_error_is_shown(panel: Panel, scene: Scene, outputs: Outputs) -> None:
    """If looking fails, the panel says so where the figures were; the next cell tries again."""
    scene.error = ValueError("no such thing")
    panel.begin(outputs)
    wait_until(lambda: outputs.figures == "the panel could not be renewed: ValueError: no such thing")
    scene.error, scene.now = None, DONE
    panel.begin(outputs)
    wait_until(lambda: "In[3] finished after 2.0 s" in outputs.figures)


def test_many_ranks_are_sent_less_often(panel: Panel, scene: Scene, outputs: Outputs) -> None:
    """A large panel stays far below what a Jupyter server lets through."""
    scene.now = replace(STRAGGLER, ranks=tuple(replace(STRAGGLER.ranks[0], rank=i) for i in range(64)))
    panel.begin(outputs)
    wait_until(lambda: "figures" in outputs.sent)
    size = len(outputs.now["figures"]["text/html"])
    before = scene.looks
    time.sleep(0.3)
    assert scene.looks - before <= 1 + 0.3 * panels.BYTES_PER_SECOND / size


def test_looks_that_cost_more_are_less_frequent(panel: Panel, scene: Scene, outputs: Outputs) -> None:
    """The panel takes at most 1 % of a cell's time, however slow the machine or many the ranks."""
    scene.now, scene.cost = STRAGGLER, 0.002
    began, before = time.perf_counter(), scene.looks
    panel.begin(outputs)
    wait_until(lambda: scene.looks == before + 3)
    assert time.perf_counter() - began > 2 * scene.cost / 0.01
