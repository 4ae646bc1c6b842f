"""README's picture can be taken again: it shows a cell that README has, and who waits for whom."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.widgets.lab import readme_picture
from tests.widgets.lab.server import LabServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser

README = Path(__file__).resolve().parents[3] / "README.md"


def test_the_picture_is_of_the_cell_in_the_text() -> None:
    """The code of both is the same, but for comments."""

    def code(text: str) -> list[str]:
        return [line.partition("  #")[0].rstrip() for line in text.splitlines()]

    block = README.read_text().partition("```python\n%%parallel")[2].partition("```")[0]
    assert code(readme_picture.SUM) == code("%%parallel" + block)


def test_the_picture_can_be_taken(lab: LabServer, browser: Browser) -> None:
    """It is taken while ranks wait, and no rank is left behind."""
    lab.write("light.ipynb", "")
    try:
        assert readme_picture.take(browser, lab, "light").startswith(b"\x89PNG")
    finally:
        lab.reset()
