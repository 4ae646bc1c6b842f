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


def test_figures_are_read_as_they_are_written() -> None:
    """Every unit, and what was not measured."""
    page = (
        "## Operations between 2 ranks\n\n"
        "| all_reduce, 8 B | 4.0 µs | 3.2 µs | – | 0.9 µs | – | 19.8 / 24.3 | 0.2 / 0.2 | met |\n"
        "| all_reduce, 64 MB | 6.0 ms | 1.50 s | 39.3 ms | – | – | 6.6 / 2.5 | 3.6 / 1.4 | met |\n"
        "| all_reduce, 64 MB, dirty | 5.8 ms | 16.0 ms | – | – | – | 6.9 / 2.5 | – | – |\n\n## Waiting\n"
    )
    found = plots.curves(page, 2)
    assert list(found) == ["shared", "private", "gloo", "MPICH"]
    assert found["shared"] == [(8, 4.0e-6), (64 << 20, 6.0e-3)]
    assert found["private"][1] == (64 << 20, 1.5)
    assert plots.curves(page, 4) == {}
