"""The pictures of benchmarks/results show what its tables say."""

from __future__ import annotations

import re

from benchmarks import plots
from benchmarks.report import newest_results


def test_pictures_are_those_of_the_page() -> None:
    """Who has changed a figure has drawn it again, and every picture is shown."""
    page = newest_results().read_text()
    drawn = plots.pictures(page)
    assert {path.name for path in plots.FOLDER.glob("all_reduce-*.svg")} == set(drawn)
    assert set(re.findall(r"\(../../docs/images/explanation/(.*?)\)", page)) == set(drawn)
    for name, svg in drawn.items():
        assert (plots.FOLDER / name).read_text() == svg, f"{name} is old: run python -m benchmarks.plots"
        assert len(svg.splitlines()) < 120
