"""Lines that ranks draw again and again: one place for each while the cell runs, then the last state."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest

from nbparallel.testing.waiting import wait_until
from nbparallel_magics.output.cell_output import CellOutput
from nbparallel_magics.output.layout import LINES_OF_A_RANK
from tests.harness.kernel import CellOutcome, Kernel
from tests.magics.output.page import Page

UP = "\x1b[A"
BOTH = "[rank 0] 0: 39 %\n[rank 1] 1: 39 %\n"


def draw(out: CellOutput, states: int = 40, *, seconds: float = 0.0) -> None:
    """Draw a bar on each of two ranks, which has no end yet."""
    for state in range(states):
        for rank in (1, 0):
            out.stream(rank, "stderr", f"\r{rank}: {state} %")
        time.sleep(seconds)


def wait_for(page: Page, text: str) -> None:
    """Wait until a page shows exactly this."""
    wait_until(lambda: page.text == text, lambda: page.text)


def end(out: CellOutput) -> None:
    """End the bars, and the cell."""
    for rank in (1, 0):
        out.stream(rank, "stderr", "\n")
    out.finish()


def test_bars_are_one_live_line_a_rank() -> None:
    """In rank order, without lines of labels, changed in place some times a second; then they are text."""
    out = CellOutput(page := Page())
    began = time.monotonic()
    draw(out, seconds=0.01)
    wait_for(page, BOTH)
    assert [kind for kind, *_ in page.shown] == ["live"]
    assert len(page.lives) <= 2 + 5 * (time.monotonic() - began)
    end(out)
    assert page.shown == [("stderr", BOTH)]
    assert page.clears == 1


@pytest.mark.slow
@pytest.mark.parametrize(("order", "can_clear"), [("stream", True), ("stream", False), ("rank", False)])
def test_where_nothing_is_cleared_they_stay_in_their_place(order: str, can_clear: bool) -> None:
    """With their last state, among what came before and after."""
    out = CellOutput(page := Page(can_clear=can_clear), order=order)
    out.stream(1, "stdout", "before\n")
    wait_for(page, "[rank 1] before\n")
    draw(out)
    wait_for(page, f"[rank 1] before\n{BOTH}")
    out.stream(0, "stdout", "after\n")
    wait_for(page, f"[rank 1] before\n{BOTH}[rank 0] after\n")
    end(out)
    assert page.text == f"[rank 1] before\n{BOTH}[rank 0] after\n"
    assert page.clears == 0
    out.stream(0, "stderr", "\rlate 1\rlate 2")
    wait_for(page, f"[rank 1] before\n{BOTH}[rank 0] after\n[rank 0] late 2\n")


def test_where_nothing_can_be_replaced_each_is_shown_when_it_has_ended() -> None:
    """As in a log file: once, and all of what was not ended at the end."""
    out = CellOutput(page := Page(can_clear=False, can_live=False))
    draw(out)
    out.stream(0, "stderr", "\n")
    wait_for(page, "[rank 0] 0: 39 %\n")
    out.finish()
    assert page.text == BOTH
    assert page.lives == []


def test_a_short_cell_shows_the_last_state_at_once() -> None:
    """Without a live line before, and with bars that left nothing left out."""
    out = CellOutput(page := Page())
    out.stream(1, "stderr", "\r0%\r100%\n")
    out.stream(0, "stderr", "\r0%\r    \r")
    out.stream(1, "stderr", "done\n")
    out.finish()
    assert (page.text, page.clears, page.lives) == ("[rank 1]\n100%\ndone\n", 0, [])


def test_ordinary_lines_after_a_bar_are_ordinary_text() -> None:
    """Of the same stream, while the cell runs; of many bars the last ones are live, and all are kept."""
    out = CellOutput(page := Page())
    for bar in range(6):
        out.stream(0, "stdout", f"\rbar {bar}\rBAR {bar}\nline {bar}\n")
    live = "".join(f"[rank 0] BAR {bar}\n" for bar in range(6 - LINES_OF_A_RANK, 6))
    lines = "".join(f"line {bar}\n" for bar in range(6))
    wait_until(lambda: live in page.text and f"[rank 0]\n{lines}" in page.text, lambda: page.text)
    out.stream(0, "stdout", "plain\n")
    wait_until(lambda: "plain\n" in page.text, lambda: page.text)
    out.finish()
    both = "".join(f"BAR {bar}\nline {bar}\n" for bar in range(6))
    assert page.text.startswith("[rank 0]\n")
    assert sorted(page.text.splitlines()[1:]) == sorted([*both.splitlines(), "plain"])


def test_empty_lines_are_the_way_to_a_bar_or_stay_empty_lines() -> None:
    """Tqdm flushes them before it draws a bar at another position; otherwise they are what was printed."""
    for order in ("rank", "stream"):
        out = CellOutput(page := Page(), order=order)
        for text in ("begin\n", "\n\n", "\r0%", UP * 2, "\n\n", "\r50%", UP * 2, "\r100%\n"):
            out.stream(0, "stderr", text)
            time.sleep(0.03)
        out.finish()
        shown = "[rank 0]\nbegin\n100%\n" if order == "rank" else "[rank 0] begin\n[rank 0] 100%\n"
        assert page.text == shown
    out = CellOutput(page := Page())
    for text in ("a", "\n", "\n", "\n", "b\n\n", "c", "\n\nd\n", "\n"):
        out.stream(0, "stdout", text)
    out.finish()
    assert page.text == "[rank 0]\na\n\n\nb\n\nc\n\nd\n\n"


def test_a_bar_of_hours_is_one_line() -> None:
    """Its states do not count as output, and none of them is kept."""
    out = CellOutput(page := Page(), limit=1000)
    draw(out, 5000)
    end(out)
    assert page.text == BOTH.replace("39", "4999")


def test_clearing_takes_back_the_lines_of_its_rank() -> None:
    """`clear_output` on one rank; the other's line goes on."""
    out = CellOutput(page := Page())
    draw(out)
    wait_for(page, BOTH)
    out.clear(0, False)
    out.stream(1, "stderr", "\r1: 41 %")
    wait_for(page, "[rank 1] 1: 41 %\n")
    out.finish()
    assert page.text == "[rank 1] 1: 41 %\n"


def test_a_bar_of_our_own_goes_when_it_is_over() -> None:
    """What came before it stays."""
    out = CellOutput(page := Page())
    out.note("early")
    out.progress("sending x: |███   | 1.0 MiB of 2.0 MiB")
    wait_for(page, "[nbparallel] early\n[nbparallel] sending x: |███   | 1.0 MiB of 2.0 MiB\n")
    out.progress("sending x: |██████| 2.0 MiB of 2.0 MiB")
    out.progress("")
    out.progress("")
    out.stream(0, "stdout", "done\n")
    out.finish()
    assert page.text == "[nbparallel] early\n[rank 0] done\n"


@pytest.mark.parametrize("order", ["rank", "stream"])
def test_where_nothing_can_be_replaced_there_is_no_bar_of_our_own(order: str) -> None:
    """As in a file; what ranks draw is shown when it has ended."""
    out = CellOutput(page := Page(can_live=False), order=order)
    out.progress("sending x")
    out.progress("")
    out.stream(0, "stdout", "done\n")
    out.finish()
    assert page.text == "[rank 0] done\n"


def test_bars_stay_live_when_the_page_is_shown_again() -> None:
    """A rank's `clear_output` clears the page: text and lines of the others are there again."""
    out = CellOutput(page := Page())
    out.stream(0, "stdout", "old\n")
    draw(out)
    wait_for(page, f"[rank 0] old\n{BOTH}")
    out.clear(0, True)
    out.stream(0, "stdout", "new\n")
    wait_until(lambda: page.clears > 0, lambda: page.text)
    wait_for(page, "[rank 0] new\n[rank 1] 1: 39 %\n")
    out.finish()
    assert page.text == "[rank 0] new\n[rank 1] 1: 39 %\n"


# with tqdm, in a real kernel ------------------------------------------------------------------------------


def on_page(outcome: CellOutcome) -> list[tuple[str, str]]:
    """Return what a front end shows, and saves: outputs by kind and text, cleared and updated."""
    shown: list[tuple[str, str, str]] = []
    for message in outcome.messages:
        content: Mapping[str, Any] = message.content
        identity = content.get("transient", {}).get("display_id", "")
        if message.kind == "clear_output":
            shown = []
        elif message.kind == "stream" and shown and shown[-1][0] == content["name"]:
            shown[-1] = (content["name"], shown[-1][1] + content["text"], "")
        elif message.kind == "stream":
            shown.append((content["name"], content["text"], ""))
        elif message.kind == "display_data":
            shown.append(("display", content["data"]["text/plain"], identity))
        elif message.kind == "update_display_data":
            text = content["data"]["text/plain"]
            shown = [("display", text, identity) if s[2] == identity else s for s in shown]
    return [(kind, text) for kind, text, _ in shown]


def updates_of(outcome: CellOutcome) -> list[str]:
    """Return the text of what was updated in its place."""
    found = [message.content for message in outcome.messages if message.kind == "update_display_data"]
    return [content["data"]["text/plain"] for content in found]


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=2)
@pytest.mark.parametrize("flags", ["", " --output stream"])
@pytest.mark.parametrize("options", ["", ", position=rank", ", position=rank, leave=True, file=sys.stdout"])
def test_tqdm_in_a_notebook(shared_kernel: Kernel, flags: str, options: str) -> None:
    """One live line a rank, no line of labels above, and the saved cell holds the last states only."""
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    shared_kernel.run("%load_ext nbparallel\n%config NbParallel.welcome = False")
    started = shared_kernel.run("%%parallel -n 3\nimport sys, time\nfrom tqdm import tqdm")
    assert started.status == "ok", started.traceback
    outcome = shared_kernel.run(
        f"%%parallel{flags}\nfor step in tqdm(range(100), desc=f'r{{rank}}'{options}):\n"
        "    time.sleep(0.01 * (1 + rank / 9))",
        timeout=60,
    )
    assert outcome.status == "ok", outcome.traceback
    ((kind, text),) = on_page(outcome)
    assert kind == ("display" if flags else "stdout" if "stdout" in options else "stderr")
    lines = text.splitlines()
    assert len(lines) == 3, text
    for rank, line in enumerate(lines):
        assert line.startswith(f"[rank {rank}] r{rank}: 100%|")
        assert " 100/100 " in line
    updates = updates_of(outcome)
    assert 2 <= len(updates) <= 12
    assert "\r" not in "".join(updates)
    places = [[line.partition(":")[0] for line in update.splitlines()] for update in updates]
    # one may come between tqdm's last two writes: the end of a bar stands on another line than the bar
    assert sum(place == sorted(set(place)) for place in places) >= len(places) - 3, updates


@pytest.mark.slow
def test_bars_inside_each_other(shared_kernel: Kernel) -> None:
    """The outer one and the inner one are live; in the end the outer one is left, or all of them."""
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    shared_kernel.run("%load_ext nbparallel\n%config NbParallel.welcome = False")
    for leave, count in (("leave=False", 1), ("leave=True", 4)):
        outcome = shared_kernel.run(
            "%%parallel -n 2\nimport time\nfrom tqdm import tqdm\n"
            "for epoch in tqdm(range(3), desc=f'out {rank}'):\n"  # what is equal on both is shown once
            f"    for step in tqdm(range(20), desc='in', {leave}):\n        time.sleep(0.02)",
            timeout=60,
        )
        ((_, text),) = on_page(outcome)
        assert all(f"out {rank}: 100%" in text for rank in (0, 1)), text
        assert text.count("it/s]") == 2 * count, text
        updates = [
            m.content["data"]["text/plain"] for m in outcome.messages if m.kind == "update_display_data"
        ]
        assert any(u.count("[rank 0] out 0:") == 1 and "[rank 0] in:" in u for u in updates)


WRITTEN_OVER = "one\ntwo\nthree\n\x1b[2A\rTWO\nTHREE\n"


@pytest.mark.parametrize("cut", [2, 4, 7, 8, 10, 14, 18, 22])
@pytest.mark.parametrize("shown", [False, True])
def test_lines_that_were_sent_are_written_over(cut: int, shown: bool) -> None:
    """However the text was cut, and though a part of it is shown already: equal on all ranks, one block."""
    page = Page()
    out = CellOutput(page)
    out.stream(0, "stdout", WRITTEN_OVER)
    out.stream(1, "stdout", WRITTEN_OVER[:cut])
    if shown:
        wait_until(lambda: "[rank" in page.text)
    out.stream(1, "stdout", WRITTEN_OVER[cut:])
    out.finish()
    assert page.text == "[ranks 0-1]\none\nTWO\nTHREE\n"
