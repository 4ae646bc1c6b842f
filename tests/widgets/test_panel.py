"""The panel: what it shows of a moment, when it looks, and that its thread ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nbparallel.errors import NO_RANKS
from nbparallel.session.monitoring.activity import RankActivity, SessionActivity
from nbparallel.testing.waiting import wait_until
from nbparallel_widgets import panel as panels
from nbparallel_widgets.panel import Panel
from nbparallel_widgets.panel_view import PanelView
from nbparallel_widgets.timeline_svg import COLOURS

RANKS = (
    RankActivity(0, 10, "waiting", "all_reduce", 3, (1, 2), 1.24, 0.2, 1.2, 5),
    RankActivity(1, 11, "computing", "", 2, (), 0.0, 1.4, 0.0, 0),
    RankActivity(2, 12, "dead", "was killed by SIGKILL: by hand, or by the system", 0, (), 0.0, 0.0, 0.0, 0),
    RankActivity(3, 13, "idle", "", 0, (), 0.0, 0.0, 0.0, 0),
)
RUNNING = SessionActivity(True, 4, 1.41, RANKS, "file_descriptor", 2, 3 << 20, 1 << 20)
IDLE = SessionActivity(False, 4, 2.5, RANKS[:2], "mmap", 1, 80, 0)


class Scene:
    """What the panel looks at, and how often it did."""

    def __init__(self) -> None:
        self.now: SessionActivity | None = None
        self.error: Exception | None = None
        self.looks = 0

    def look(self) -> SessionActivity | None:
        """Look."""
        self.looks += 1
        if self.error is not None:
            raise self.error
        return self.now


@pytest.fixture
def scene() -> Scene:
    """Return what a panel can look at."""
    return Scene()


@pytest.fixture
def panel(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Iterator[Panel]:
    """Return a panel that looks often."""
    monkeypatch.setattr(panels, "INTERVAL", 0.01)
    made = Panel(scene.look)
    yield made
    made.close()
    assert not any(thread.name == "nbparallel-panel" for thread in threading.enumerate())


def test_text_and_html_tell_the_same() -> None:
    """Who waits names the ranks that are missing and the line; a dead rank says how it died."""
    text = repr(PanelView(RUNNING))
    assert text.splitlines()[0] == "In[4] runs on ranks 0-2, for 1.4 s"
    assert "waiting in all_reduce for ranks 1-2, line 3, for 1.2 s  200 ms     1.2 s" in text
    assert "dead: killed by SIGKILL; the next cell starts it again" in text
    assert text.splitlines()[-1] == (
        "shared memory (file_descriptor): 3.0 MiB in 2 segments, 1.0 MiB more kept for the next arrays"
    )
    html = PanelView(RUNNING)._repr_html_()
    for words in ("waiting in all_reduce for ranks 1-2, line 3", "killed by SIGKILL", "14 % computing"):
        assert words in html
    for words in ("computing", "waiting"):  # the colours of the bars stand beside them
        assert f'{words} <span style="color:{COLOURS[words]}"' in html
    assert "<script" not in html
    assert "<style" not in html
    assert repr(PanelView(None)) == NO_RANKS
    assert NO_RANKS in PanelView(None)._repr_html_()
    assert repr(PanelView(IDLE)).startswith("In[4] took 2.5 s on ranks 0-1")


def test_it_looks_only_while_something_runs(panel: Panel, scene: Scene) -> None:
    """While the notebook or ranks run something it follows; then it sleeps, and nothing is sent twice."""
    assert NO_RANKS in panel.widget.value
    time.sleep(0.1)
    assert scene.looks == 1
    panel.begin()
    wait_until(lambda: scene.looks > 3)
    scene.now = RUNNING
    wait_until(lambda: "runs on ranks" in panel.widget.value)
    panel.end()  # the ranks go on: a cell with --async
    before = scene.looks
    wait_until(lambda: scene.looks > before + 3)
    sent: list[Any] = []
    panel.widget.observe(sent.append, "value")
    before = scene.looks
    wait_until(lambda: scene.looks > before + 3)
    assert sent == []
    scene.now = IDLE
    wait_until(lambda: "In[4] took 2.5 s" in panel.widget.value)
    time.sleep(0.1)
    before = scene.looks
    time.sleep(0.1)
    assert scene.looks == before


def test_closing(panel: Panel, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was shown stays where it was shown, as text; the widget is closed; again is fine."""
    shown: list[tuple[dict[str, Any], str]] = []
    monkeypatch.setattr(panels, "display", lambda data, raw, display_id: shown.append((data, display_id)))
    updated: list[tuple[dict[str, Any], str]] = []
    monkeypatch.setattr(
        panels, "update_display", lambda data, raw, display_id: updated.append((data, display_id))
    )
    panel.show()
    panel.show()
    data, first = shown[0]
    assert {"text/plain", "text/html", "application/vnd.jupyter.widget-view+json"} <= set(data)
    scene.now = IDLE
    panel.begin()
    wait_until(lambda: "took 2.5 s" in panel.widget.value)
    panel.close()
    panel.close()
    assert [identity for _, identity in updated] == [first, shown[1][1]]
    assert set(updated[0][0]) == {"text/plain", "text/html"}
    assert "took 2.5 s" in updated[0][0]["text/plain"]


def test_an_error_is_shown(panel: Panel, scene: Scene) -> None:
    """If looking fails, the panel says so where the figures were; nothing is swallowed."""
    scene.error = ValueError("no such thing")
    panel.begin()
    wait_until(lambda: panel.widget.value == "the panel has ended: ValueError: no such thing")
