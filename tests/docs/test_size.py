"""The documentation stays small, its sentences short, and its figures those of the results."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import published
from benchmarks.report import newest_results
from docs.site import words

ROOT = Path(__file__).resolve().parent.parent.parent
LONGEST = 38
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_FIGURE = re.compile(r"(\d[\d.,]*) (µs|ms|s|×|times as fast|times faster)(?![\w/])")


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page's prose; a cell of a table and an item of a list end one."""
    prose = re.sub(r"\]\([^)]*\)", "]", _FENCE.sub("\n\n", re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)))
    code = re.compile(r"`[^`]*`")
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.|\||>|#)\s)", prose):
        for cell in block.split("|"):
            flat = " ".join(code.sub("x", cell).split())
            yield from re.split(r"(?<=[.!?:;])\s+(?=\S)", flat)


def test_the_words_are_within_their_budget() -> None:
    """All pages together, and each page; the command that CI runs prints them."""
    counted = {path.name: words.words(path) for path in words.pages()}
    assert sum(counted.values()) <= words.MOST_WORDS
    assert {name: number for name, number in counted.items() if number > words.MOST_OF_A_PAGE} == {}
    assert words.main() == 0


@pytest.mark.parametrize("page", words.pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_is_too_long(page: Path) -> None:
    """No sentence of a page has more than 38 words."""
    long = [text for text in sentences(page.read_text()) if len(text.split()) > LONGEST]
    assert not long, f"{page.name}: sentences of more than {LONGEST} words:\n" + "\n".join(long)


def test_the_published_figures_are_those_of_the_results() -> None:
    """README and performance page hold the tables that `python -m benchmarks.published` writes."""
    for page, text in published.pages().items():
        assert page.read_text() == text, f"{page.name} is old: run python -m benchmarks.published"


def known_figures(results: str) -> set[str]:
    """Return every figure of the results as it may be published."""
    times = {published.seconds_in(found[0]) for found in re.finditer(r"\d[\d.]* (?:µs|ms|s)\b", results)}
    ratios = re.findall(r"\d[\d.]* ×", results)
    return {published.shown(seconds) for seconds in times if seconds} | set(ratios)


SETTINGS = {
    "0.2 s", "0.5 s", "1 s", "2 s", "5 s", "10 s", "15 s", "30 s", "60 s",
}  # fmt: skip
"""Waits and time-outs that are promised or set, not measured."""


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", *sorted((ROOT / "docs" / "how-to").glob("*.md"))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_measured_number_is_one_of_the_results(page: Path) -> None:
    """A number with a unit of time in README and guides is in the newest results, as `shown` writes it."""
    text = _FENCE.sub("", page.read_text())
    known = known_figures(newest_results().read_text()) | SETTINGS
    for path in (newest_results().parent / "hosts-2-cores.md", newest_results().parent / "hosts-16-cores.md"):
        known |= known_figures(path.read_text())
    pairs = re.sub(r"(\d[\d.]*) / (\d[\d.]*) (µs|ms|s)\b", r"\1 \3 / \2 \3", text)
    unknown = {f"{number} {unit}" for number, unit in _FIGURE.findall(pairs)} - known
    assert not unknown, f"{page.name}: not in benchmarks/results: {', '.join(sorted(unknown))}"
