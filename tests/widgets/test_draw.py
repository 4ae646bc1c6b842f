"""Pictures of what ranks hold: colours, words, a table, and what a screen reader reads."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from nbparallel.session.results import DrawnValues
from nbparallel.wire.inspection import DrawnNames, ShownBlock, ShownValue
from nbparallel_widgets import sheet
from nbparallel_widgets.draw import DrawnView, number_text, svg
from nbparallel_widgets.sheet import COLOURS, KINDS

SVG = "{http://www.w3.org/2000/svg}"


def array(*numbers: Any, count: int = 0) -> ShownValue:
    """Return an array of one axis that begins with these numbers."""
    count = count or len(numbers)
    return ShownValue((ShownBlock((numbers,), count, f"{count} int64"),), 0, numbers, count == len(numbers))


def word(text: str) -> ShownValue:
    """Return something in words."""
    return ShownValue((ShownBlock(word=text),))


def drawn(before: list[Any], after: list[Any], **parts: Any) -> DrawnValues:
    """Return the picture of one name, with a value for each rank."""
    begun = [(value,) for value in before] or [()] * len(after)
    reports = {rank: DrawnNames(begun[rank], (value,), rank, rank) for rank, value in enumerate(after)}
    return DrawnValues(("x",), reports, number=3 if before else 0, **parts)


ALL_TO_ALL = drawn([array(1, 2), array(11, 12)], [array(1, 11), array(2, 12)])
ALL_REDUCE = drawn([array(1, 2), array(11, 12)], [array(12, 14), array(12, 14)])


def boxes(picture: DrawnValues) -> list[tuple[str, str]]:
    """Return each number with what its box looks like: a colour, ``outlined`` or ``tinted``."""
    found = []
    for group in ElementTree.fromstring(svg(picture)).iter(f"{SVG}g"):
        box, text = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
        assert box is not None
        assert text is not None
        look = "tinted" if box.get("fill") is None else str(box.get("fill"))
        if box.get("fill") == "none":
            assert box.get("stroke") == sheet.GREY
            look = "outlined"
        found.append((str(text.text), look))
    return found


def test_numbers_keep_the_colour_of_their_rank() -> None:
    """all_to_all is seen to transpose."""
    one, other = sheet.RANKS[:2]
    assert boxes(ALL_TO_ALL) == [
        ("1", one), ("2", one), ("1", one), ("11", other),
        ("11", other), ("12", other), ("2", one), ("12", other),
    ]  # fmt: skip


def test_colours_of_names_that_one_cell_makes() -> None:
    """Numbers have the colour of the rank that has them in the first name, and a line states that."""
    one, other = sheet.RANKS[:2]
    values = [(array(1, 2), array(1, 11)), (array(11, 12), array(2, 99))]
    reports = {rank: DrawnNames((None, None), pair, rank, rank) for rank, pair in enumerate(values)}
    picture = DrawnValues(("x", "y"), reports, number=3)
    looks = [("1", one), ("2", one), ("11", other), ("12", other)]
    assert boxes(picture)[:8] == [*looks, ("1", one), ("11", other), ("2", one), ("99", "outlined")]
    said = "made in this cell: a number is in the colour of the rank that has it in x"
    assert said in repr(DrawnView(picture)).splitlines()[-1]
    assert said in svg(picture)
    assert said not in svg(ALL_TO_ALL)


def test_new_numbers_are_outlined() -> None:
    """Also where they equal a number that was there: then they are that one.  Several ranks': a tint."""
    looks = boxes(ALL_REDUCE)
    assert looks[2:4] == looks[6:8] == [("12", sheet.RANKS[1]), ("14", "outlined")]
    same = drawn([array(5), array(5)], [array(5), array(6)])
    assert boxes(same) == [("5", "tinted"), ("5", "tinted"), ("5", "tinted"), ("6", "outlined")]


def test_of_a_long_array_nothing_is_called_new() -> None:
    """Where not all numbers before are known, one that is not among them may have been there."""
    picture = drawn([array(1, 2, count=9999), array(7)], [array(3, 1), array(7)])
    assert boxes(picture)[2:4] == [("3", "tinted"), ("1", sheet.RANKS[0])]
    assert "the first 4,096 numbers were compared" in repr(DrawnView(picture))
    assert "the first 4,096 numbers were compared" in svg(picture)


def lightness(colour: str) -> float:
    """Return L* of CIELAB, from 0 (black) to 100: how light a colour looks in grey."""
    return float(116 * sheet.luminance(colour) ** (1 / 3) - 16)  # of colours that are not nearly black


def test_contrast() -> None:
    """Text on a rank's colour has at least 4.5:1, an outline 3:1 on white and on JupyterLab's dark.

    Kinds of time, and the first ranks, differ in grey by an eighth of the way from black to white.
    """
    for colour in sheet.RANKS:
        assert sheet.contrast(colour, sheet.text_on(colour)) >= 4.5
    for background in ("#ffffff", "#111111"):
        assert sheet.contrast(sheet.GREY, background) >= 3
    for colours in ([COLOURS[kind] for kind in KINDS], sheet.RANKS[:4]):
        light = sorted(map(lightness, colours))
        assert all(b - a >= 12 for a, b in pairwise(light)), "alike in grey"
    assert sheet.contrast(sheet.VERMILLION, "#000") >= 4.5, "of a chip"
    assert len(set(sheet.RANKS)) == len(sheet.RANKS) >= 4
    for element in ElementTree.fromstring(svg(ALL_TO_ALL)).iter():
        if element.tag == f"{SVG}text" and element.get("fill"):
            assert element.get("fill") in ("#000", "#fff")


def test_more_ranks_than_colours() -> None:
    """Ranks of one colour differ in the outline of their boxes."""
    many = drawn([], [array(rank) for rank in range(20)])
    picture = svg(many)
    assert picture.count('stroke-dasharray="3 2"') == 2 * 7
    assert picture.count('stroke-dasharray="1 2"') == 2 * 6
    assert sheet.colour_of(8) == sheet.colour_of(1)


def test_one_element_for_every_page() -> None:
    """No script, style sheet or id, which could meet another picture's; the page's own colour for text."""
    picture = svg(ALL_TO_ALL)
    assert not re.search(r"<script|<style|\bid=|\bclass=|href|url\(", picture)
    root = ElementTree.fromstring(picture)
    assert root.get("fill") == "currentColor"
    assert root.get("role") == "img"
    assert "max-width:100%" in str(root.get("style"))
    width, height = (float(number) for number in str(root.get("viewBox")).split()[2:])
    assert 300 < width < 500
    assert height > 50
    assert all(float(text.get("font-size", 13)) >= 12 for text in root.iter(f"{SVG}text"))


def test_what_a_screen_reader_reads() -> None:
    """Title and description say what was where before, what is there now, and where it came from."""
    root = ElementTree.fromstring(svg(ALL_TO_ALL))
    title, about = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title is not None
    assert about is not None
    assert title.text == root.get("aria-label") == "x on ranks 0-1 before and after In[3]"
    assert about.text == (
        "name x, where rank 0, before 1 2, after 1 11, numbers from ranks 0-1. "
        "name x, where rank 1, before 11 12, after 2 12, numbers from ranks 0-1."
    )
    assert "after 12 14, numbers from rank 1, new" in svg(ALL_REDUCE)


def test_text() -> None:
    """In a terminal, and where a page is cleaned of pictures, it is a table."""
    table = """\
x on ranks 0-1 before and after In[3]
name  where   before  after  numbers from
x     rank 0  1 2     1 11   ranks 0-1
x     rank 1  11 12   2 12   ranks 0-1"""
    assert repr(DrawnView(ALL_TO_ALL)) == table
    page = DrawnView(ALL_TO_ALL)._repr_html_()
    cleaned = re.sub(r"<svg.*?</svg>", "", page)
    for line in table.splitlines()[2:]:
        for part in re.split(r"\s{2,}", line):
            assert f">{part}<" in cleaned


def test_long_arrays_are_cut_and_wrapped() -> None:
    """Of 2,000 numbers sixteen are there, in lines that a narrow page can show."""
    picture = svg(drawn([], [array(*range(16), count=2000)] * 2))
    assert "… 1,984 more" in picture
    before, after = array(*[n + 0.1234 for n in range(16)]), array(*[n * 1e-7 for n in range(16)])
    wide = svg(drawn([before] * 2, [after] * 2))
    found = re.search(r'viewBox="-1 -1 (\d+) ', wide)
    assert found
    assert int(found[1]) < 540
    numbers = [text for text, _ in boxes(drawn([], [before]))]
    assert numbers == [f"{n + 0.1234:.4g}" for n in range(12)]  # four lines of three
    assert "… 4 more" in svg(drawn([], [before]))


def test_words_and_names_that_lack() -> None:
    """None and objects are words, with what HTML would take for markup escaped; a missing name is said."""
    picture = drawn([None, word("<b> & c")], [word("None"), None], died={2: "was killed by SIGKILL"})
    text = repr(DrawnView(picture))
    assert re.search(r"rank 0\s+not defined\s+None", text)
    assert re.search(r"rank 1\s+<b> & c\s+not defined", text)
    assert re.search(r"rank 2\s+was killed by SIGKILL", text)
    words = [node.text for node in ElementTree.fromstring(svg(picture)).iter(f"{SVG}text")]
    assert words.count("not defined") == 2
    assert {"<b> & c", "None", "was killed by SIGKILL"} <= set(words)
    assert "name x, where rank 2, after was killed by SIGKILL.</desc>" in svg(picture), (
        "nothing is read empty"
    )


def test_matrices_and_lists() -> None:
    """Rows of an array with two axes touch; the elements of a list stand apart."""
    matrix = ShownValue((ShownBlock(((1, 2), (3, 4)), 4, "2 × 2 int64"),), 0, (1, 2, 3, 4))
    elements = ShownValue(tuple(ShownBlock(((n,),), 1) for n in (1, 2)), 3, (1, 2))

    def places(value: ShownValue) -> list[tuple[float, float]]:
        groups = ElementTree.fromstring(svg(drawn([], [value]))).iter(f"{SVG}g")
        rects = [group.find(f"{SVG}rect") for group in groups]
        return [(float(r.get("x", 0)), float(r.get("y", 0))) for r in rects if r is not None]

    (a, top), (b, _), (c, low), _ = places(matrix)
    assert a == c
    assert low - top == 22
    (first, y), (second, same) = places(elements)
    assert y == same
    assert second - first > b - a + 2
    assert "2 × 2 int64" in svg(drawn([], [matrix]))
    assert "1 2  rank 0\n" in repr(DrawnView(drawn([], [matrix])))
    assert "1 | 2 | … 3 more" in repr(DrawnView(drawn([], [elements])))


def test_the_first_look_at_shared_memory_counts() -> None:
    """What other ranks had written when a rank looked was not there before the cell."""

    def look(*numbers: int) -> ShownValue:
        blocks = tuple(ShownBlock(((n,),), 1, "1 int64", rank=rank) for rank, n in enumerate(numbers))
        return ShownValue((ShownBlock((numbers,), 2, "2 int64"),), 0, numbers, True, 4, 0, 16, blocks)

    reports = {
        0: DrawnNames((look(5, 51),), (look(50, 51),), 20, 99),  # rank 1 has written its 51
        1: DrawnNames((look(5, 6),), (look(5, 51),), 10, 50),
    }
    picture = boxes(DrawnValues(("x",), reports, number=1))
    assert picture == [("5", "tinted"), ("6", "tinted"), ("50", "outlined"), ("51", "outlined")]


def test_one_box_for_shared_memory() -> None:
    """What is the same memory on all ranks is drawn once; the first look and the last one count."""
    parts = [tuple(ShownBlock(((base + r,),), 9, "9 int64", rank=r) for r in range(2)) for base in (1, 5, 9)]
    values = [ShownValue((ShownBlock(),), segment=4, stop=8, parts=part) for part in parts]
    reports = {
        0: DrawnNames((values[1],), (values[2],), 20, 99),
        1: DrawnNames((values[0],), (values[1],), 10, 50),
    }
    picture = DrawnValues(("x",), reports, number=1)
    text = repr(DrawnView(picture))
    assert "all (shared)  rank 0: 1 … 8 more | rank 1: 2 … 8 more  rank 0: 9 … 8 more | rank 1: 10" in text
    words = [node.text for node in ElementTree.fromstring(svg(picture)).iter(f"{SVG}text")]
    assert words.count("shared") == 1
    assert words.count("rank 1 … 8 more") == 2


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (12.5, "12.5"), (1e6, "1e+06"), (True, "True"), (0.1 + 0.2, "0.3"), (float("inf"), "inf"),
        (-123456789, "-123456789"), (10**12, "1e+12"), (2j, "0+2j"), ("abc", "abc"),
        (-0.00012345, "-0.0001234"),
    ],
)  # fmt: skip
def test_numbers_are_short(number: Any, text: str) -> None:
    """Four digits, or a whole number as it is."""
    assert number_text(number) == text
