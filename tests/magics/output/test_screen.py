"""Text that moves the cursor, as a terminal shows it."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from nbparallel_magics.output.layout import Screen, moves_cursor

UP = "\x1b[A"
DRAWN = {
    # what tqdm 4.70 writes, shortened
    "a bar": ("\r0%\r50%\r100%\r100%\n", ["100%"]),
    "position=2": (f"\n\n\r0%{UP}{UP}\n\n\r50%{UP}{UP}\r100%\n", ["100%"]),
    "a bar that was broken off": (f"\n\r0%{UP}\n\r67%{UP}\r67%\n", ["67%"]),
    "a bar that is not closed": (f"\n\r0%{UP}\n\r67%{UP}", ["67%"]),
    "leave=False": ("\r0%\r100%\r    \r", []),
    "two bars": (f"\ra0\n\rb0{UP}\ra1\n\rb1{UP}\ra2\n\rb2{UP}\ra2\n\rb2\n", ["a2", "b2"]),
    "the lower one ends first": (f"\ra0\n\rb0{UP}\ra1\n\rb1{UP}\rb2\n\ra2\n", ["b2", "a2"]),
    "one inside the other": (
        f"\ro0\n\ri0{UP}\n\ri1{UP}\ri2\n\ro1\n\ri0{UP}\n\ri1{UP}\ri2\n\ro2\n",
        ["i2", "i2", "o2"],
    ),
    "inside, leave=False": (
        f"\rout 0\n\rin 0{UP}\n\rin 1{UP}\n\r    {UP}\rout 1\n\rin 0{UP}\n\r    {UP}\rout 2\n",
        ["out 2"],
    ),
    "tqdm.write": ("\r0%\r  \rhello\n\r0%\r50%\r   \rbye\n\r100%\n", ["hello", "bye", "100%"]),
    # others
    "a spinner": ("working |\b/\b-\b\\\bdone\n", ["working done"]),
    "the return at the end": ("5%\r10%\r", ["10%"]),
    "erased": ("long text\r\x1b[Kshort\n", ["short"]),
    "erased as a whole": ("long text\x1b[2K\rshort\n", ["short"]),
    "up by a number": ("a\nb\nc\x1b[2A\rA\x1b[1B\rB\n\n", ["A", "B", "c"]),
    "to a column": ("abcdef\x1b[3Gx\x1b[2Dy\x1b[Cz\n", ["ayxzef"]),
    "colours": ("\r\x1b[32m 5%\x1b[0m\r\x1b[32m10%\x1b[0m\n", ["\x1b[32m10%\x1b[0m"]),
    "lines between": ("\r0%\r9%\nplain\n\nmore\n", ["9%", "plain", "", "more"]),
    "an end of line of Windows": ("a\r\nb\r\n", ["a", "b"]),
}


@pytest.mark.parametrize(("text", "lines"), DRAWN.values(), ids=DRAWN)
@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_the_lines_are_those_that_a_terminal_shows_last(text: str, lines: list[str], size: int) -> None:
    """However the text was cut; lines that the cursor only passed, or that were wiped out, are none."""
    screen = Screen()
    for start in range(0, len(text), size):
        screen.feed(text[start : start + size])
    ended, begun = screen.end()
    assert [line.text for line in ended] + [begun] * bool(begun) == lines


def test_only_what_moves_the_cursor_is_drawn() -> None:
    """Colours and ends of lines are ordinary text."""
    assert not moves_cursor("a\r\nb\x1b[31mred\x1b[0m\ttab\n")
    for text in ("\r5%", "5%\r", "|\b/", UP, "\x1b[2K"):
        assert moves_cursor(text)


@given(st.text(alphabet="ab \r\n\b\x1b[;0123456789ABCDGKJmh"))
def test_any_text_can_be_drawn(text: str) -> None:
    """Nothing raises, and text without moves comes out as it went in."""
    whole, pieces = Screen(), Screen()
    whole.feed(text)
    for character in text:
        pieces.feed(character)
        assert all(line.text for line in pieces.live)
    (one, last), (other, end) = whole.end(), pieces.end()
    assert [line.text for line in one] + [last] == [line.text for line in other] + [end]
    plain = text.translate(dict.fromkeys(map(ord, "\r\b\x1b")))
    screen = Screen()
    screen.feed(plain)
    ended, begun = screen.end()
    assert "".join(f"{line.text}\n" for line in ended) + begun == plain
