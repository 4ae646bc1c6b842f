"""The output of a cell: labels, folding, order, and how much of it."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import Any

import pytest

from nbparallel import Session
from nbparallel.testing.waiting import wait_until
from nbparallel_magics.output import cell_output
from nbparallel_magics.output.cell_output import CellOutput
from tests.magics.output.page import Page


@pytest.fixture
def page() -> Page:
    """Return an empty page."""
    return Page()


def wait_until_shown(page: Page, words: str) -> None:
    """Wait until a page shows some words."""
    wait_until(lambda: words in page.text, lambda: page.text)


@pytest.mark.parametrize(
    ("order", "sent", "shown"),
    [
        (
            "rank",
            [(2, "line of 2\n"), (0, "line of 0\n"), (1, "line of 1\n")],
            "[rank 0] line of 0\n[rank 1] line of 1\n[rank 2] line of 2\n",
        ),
        (
            "rank",
            [(rank, f"{rank}.{line}\n") for rank in (0, 1) for line in range(3)],
            "[rank 0]\n0.0\n0.1\n0.2\n[rank 1]\n1.0\n1.1\n1.2\n",
        ),
        (
            "rank",
            [(rank, f"loading\nready\nrank {rank}\n") for rank in range(3)],
            "[ranks 0-2]\nloading\nready\n[rank 0] rank 0\n[rank 1] rank 1\n[rank 2] rank 2\n",
        ),
        (
            "stream",
            [(rank, "x\n") for rank in (2, 0, 0, 1)],
            "[rank 2] x\n[rank 0]\nx\nx\n[rank 1] x\n",
        ),
    ],
    ids=["in rank order", "one label for a block", "a common start once", "as it came, nothing folded"],
)
def test_a_short_cell_is_shown_once(page: Page, order: str, sent: list[tuple[int, str]], shown: str) -> None:
    """In its order, with labels and folds, and without clearing anything."""
    out = CellOutput(page, order=order)
    for rank, text in sent:
        out.stream(rank, "stdout", text)
    out.finish()
    assert page.text == shown
    assert page.clears == 0


def test_values_are_in_rank_order_where_nothing_can_be_taken_back() -> None:
    """In a terminal, and in the cell that loads the extension, they come at the end, text as it comes."""
    page = Page(can_clear=False)
    out = CellOutput(page)
    out.result(2, {"text/plain": "two"}, {})
    out.stream(1, "stdout", "text\n")
    wait_until_shown(page, "[rank 1] text\n")
    out.result(1, {"text/plain": "one"}, {})
    out.stream(0, "stdout", "more\n")
    wait_until_shown(page, "more")
    assert "Out" not in page.text
    out.result(0, {"text/plain": "two"}, {})
    out.finish()
    assert page.text == "[rank 1] text\n[rank 0] more\nOut[ranks 0, 2]: two\nOut[rank 1]: one\n"
    out.result(1, {"text/plain": "late"}, {})
    wait_until_shown(page, "late")


def test_equal_text_is_folded(page: Page) -> None:
    """What several ranks printed alike is there once; ranks need not be neighbours."""
    out = CellOutput(page)
    for rank in range(4):
        out.stream(rank, "stdout", "odd\n" if rank % 2 else "even\n")
        out.result(rank, {"text/plain": str(rank // 2)}, {})
    out.finish()
    assert page.text == ("[ranks 0, 2] even\n[ranks 1, 3] odd\nOut[ranks 0-1]: 0\nOut[ranks 2-3]: 1\n")


def test_streams_are_kept_apart(page: Page) -> None:
    """Stderr goes to stderr with its own labels; a line without an end is ended before the next label."""
    out = CellOutput(page)
    out.stream(0, "stdout", "no end")
    out.stream(0, "stderr", "warning\n")
    out.stream(1, "stdout", "one")
    out.stream(2, "stdout", "two")
    out.finish()
    assert page.shown == [
        ("stdout", "[rank 0] no end"),
        ("stderr", "[rank 0] warning\n"),
        ("stdout", "[rank 1] one\n[rank 2] two"),
    ]


def test_displays_and_values(page: Page) -> None:
    """A picture stands under its rank's label, a value of several lines below its own; equal ones are one."""
    out = CellOutput(page)
    for rank in (0, 1):
        out.display(rank, {"image/png": "data", "text/plain": "<Figure>"}, {}, {}, False)
        out.display(rank, {"text/plain": "just text"}, {}, {}, False)
        out.result(rank, {"text/plain": f"array([{rank},\n       1])"}, {})
    out.finish()
    assert page.text == (
        "[ranks 0-1]\n<display>\n[ranks 0-1] just text\n"
        "Out[rank 0]:\narray([0,\n       1])\nOut[rank 1]:\narray([1,\n       1])\n"
    )


def test_output_is_live_and_then_in_order(page: Page) -> None:
    """What comes is shown within 0.2 s; at the end it is shown in rank order, and again only if it must."""
    out = CellOutput(page)
    started = time.monotonic()
    out.stream(1, "stdout", "first\n")
    wait_until_shown(page, "[rank 1] first\n")
    assert time.monotonic() - started < 0.2
    out.stream(0, "stdout", "second\n")
    wait_until_shown(page, "[rank 0] second\n")
    assert page.text == "[rank 1] first\n[rank 0] second\n"
    out.finish()
    assert page.text == "[rank 0] second\n[rank 1] first\n"
    assert page.clears == 1


@pytest.mark.parametrize(
    ("options", "sent", "live", "end"),
    [
        ({}, [(0, "a\nb\n"), (0, "c\n"), (1, "d\n")], "[rank 0]\na\nb\nc\n[rank 1] d\n", ""),
        ({}, [(0, "a\n"), (0, "b\n")], "[rank 0] a\n[rank 0] b\n", "[rank 0]\na\nb\n"),
        ({}, [(0, "0."), (0, "1."), (0, "2.")], "[rank 0] 0.1.2.", ""),
        ({"order": "stream"}, [(1, "first\n"), (0, "second\n")], "[rank 1] first\n[rank 0] second\n", ""),
        ({"can_clear": False}, [(1, "first\n"), (0, "second\n")], "[rank 1] first\n[rank 0] second\n", ""),
    ],
    ids=["in order", "a label a line, then a block", "dots", "as it came", "a terminal"],
)
def test_lines_that_come_one_by_one(
    options: dict[str, Any], sent: list[tuple[int, str]], live: str, end: str
) -> None:
    """Each is shown under its rank's label; only what looks otherwise in the end is shown again."""
    page = Page(can_clear=options.get("can_clear", True))
    out = CellOutput(page, order=options.get("order", "rank"))
    for rank, text in sent:
        out.stream(rank, "stdout", text)
        wait_until_shown(page, text)
    assert page.text == live
    out.finish()
    assert page.text == (end or live)
    assert page.clears == bool(end)


def test_an_interrupt_while_the_end_is_shown_loses_nothing(page: Page) -> None:
    """If the last words are interrupted half-way, asking again shows all of them."""
    out = CellOutput(page)
    for rank in (1, 0):
        out.stream(rank, "stdout", f"a{rank}\n")
        wait_until_shown(page, f"a{rank}")
        out.stream(rank, "stderr", f"b{rank}\n")
    stream, page.stream = page.stream, interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        out.finish()
    page.stream = stream  # type: ignore[method-assign]
    out.finish()
    assert page.text == "[rank 0] a0\n[rank 0] b0\n[rank 1] a1\n[rank 1] b1\n"


def interrupted(name: str, text: str) -> None:
    """Be interrupted."""
    raise KeyboardInterrupt


def test_late_output_is_shown_as_it_comes(page: Page) -> None:
    """A thread that prints after the cell's end is heard under its rank's label; no thread of ours stays."""
    out = CellOutput(page)
    out.finish()
    out.stream(3, "stdout", "late\n")
    wait_until_shown(page, "[rank 3] late\n")
    out.stream(3, "stdout", "more\n")
    wait_until_shown(page, "[rank 3] more\n")
    out.display(3, {"image/png": "x"}, {}, {"display_id": "a"}, False)
    wait_until_shown(page, "<display>")
    out.display(3, {"image/png": "y"}, {}, {"display_id": "a"}, True)
    out.clear(3, False)
    out.stream(3, "stdout", "last\n")
    wait_until_shown(page, "last\n")
    assert page.shown[-2][1] == {"image/png": "y"}
    assert page.clears == 0
    wait_until(lambda: all(thread.name != "nbparallel-output" for thread in threading.enumerate()))


def test_updates_belong_to_their_rank(page: Page) -> None:
    """A display that is updated is its rank's own, and is shown again as it was last."""
    out = CellOutput(page)
    for rank in (1, 0):
        out.display(rank, {"image/png": "old"}, {}, {"display_id": "same"}, False)
        wait_until_shown(page, f"[rank {rank}]")
    out.display(1, {"image/png": "new"}, {}, {"display_id": "same"}, True)
    out.finish()
    displays = [s for s in page.shown if s[0] == "display"]
    assert [d[1]["image/png"] for d in displays] == ["old", "new"]
    assert len({d[2]["display_id"] for d in displays}) == 2


def test_clear_output_of_a_rank(page: Page) -> None:
    """A rank's `clear_output` takes back what that rank has shown, and nothing else."""
    out = CellOutput(page)
    out.stream(1, "stdout", "of 1\n")
    for number in range(3):
        out.clear(0, number > 0)
        out.stream(0, "stdout", f"frame {number}\n")
        wait_until_shown(page, f"frame {number}")
    out.finish()
    assert page.text == "[rank 0] frame 2\n[rank 1] of 1\n"
    out = CellOutput(page := Page())
    out.stream(0, "stdout", "gone\n")
    wait_until_shown(page, "gone")
    out.clear(0, False)
    out.finish()
    assert page.text == ""


def test_no_label_stands_over_what_shows_nothing(page: Page) -> None:
    """A display of a style sheet, or of empty HTML, is published without a label; a picture has one."""
    out = CellOutput(page)
    for rank, html in enumerate(("", "<style>\nb{}</style><!-- x -->", "<b>x</b>")):
        out.display(rank, {"text/plain": "<HTML object>", "text/html": html}, {}, {}, False)
    out.display(3, {"text/plain": "<Figure>", "image/png": "abc"}, {}, {}, False)
    out.finish()
    assert page.text == "<display>\n<display>\n[rank 2]\n<display>\n[rank 3]\n<display>\n"


def test_notes_stand_where_they_came(page: Page) -> None:
    """A note before any output stands above it, a later one below."""
    out = CellOutput(page)
    out.note("rank 1 came back")
    out.stream(0, "stdout", "x\n")
    out.note("y was copied")
    out.finish()
    assert page.text == "[nbparallel] rank 1 came back\n[rank 0] x\n[nbparallel] y was copied\n"


@pytest.mark.slow
def test_a_page_full_of_text_is_seldom_rendered_again(page: Page) -> None:
    """New output waits in proportion to what is there: else a browser falls behind a print loop."""
    out = CellOutput(page)
    out.stream(0, "stdout", ("x" * 99 + "\n") * 4000)
    wait_until_shown(page, "x")
    for line in range(40):
        out.stream(0, "stdout", f"line {line}\n")
        time.sleep(0.02)
    live = list(page.times)
    out.finish()
    assert all(later - earlier >= 0.3 for earlier, later in pairwise(live))
    assert page.text.endswith("line 39\n")


def test_a_terminal_shows_new_lines_below_much_text_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It renders nothing again; here a thousand characters would mean a wait of a thousand seconds."""
    monkeypatch.setattr(cell_output, "RENDER_SECONDS", 1.0)
    page = Page(can_clear=False, renders_again=False)
    out = CellOutput(page)
    out.stream(0, "stdout", "x" * 1000 + "\n")
    wait_until_shown(page, "x")
    out.stream(0, "stdout", "more\n")
    wait_until_shown(page, "more")
    out.finish()


def test_who_is_asked_sees_what_was_printed_before(
    two_ranks: Session, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to a debugger's last command stands above its next prompt."""
    monkeypatch.setattr(cell_output, "INTERVAL", 60.0)
    seen: list[str] = []

    def answer(prompt: str) -> str:
        seen.append(page.text)
        return prompt

    monkeypatch.setattr("builtins.input", answer)
    cell = "print('first')\ninput('one? ')\nprint('second')\ninput('two? ')"
    two_ranks.run(cell, ranks=[0], sink=CellOutput(page))
    assert [text.split()[-1] for text in seen] == ["first", "second"]


def test_it_can_be_shown_again() -> None:
    """All of it, in rank order with notes and late output, also while the cell runs; until it is dropped."""
    out = CellOutput(Page(), order="rank")
    out.note("above")
    out.stream(1, "stdout", "of 1\n")
    out.stream(0, "stdout", "of 0\n")
    out.result(1, {"text/plain": "7"}, {})
    shown = "[nbparallel] above\n[rank 0] of 0\n[rank 1] of 1\nOut[rank 1]: 7\n"
    for late in ("", "[rank 2] late\n"):
        for _ in range(2):
            page = Page()
            out.repeat(CellOutput(page, order="stream" if late else "rank"))
            assert sorted(page.text.splitlines()) == sorted((shown + late).splitlines())
        if not late:
            assert page.text == shown
            out.finish()
            out.stream(2, "stdout", "late\n")
    out.drop_record()
    out.repeat(CellOutput(page := Page()))
    assert "of 0" not in page.text
