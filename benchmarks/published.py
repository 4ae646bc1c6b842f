"""Tables of figures that readers see, taken from the newest results: the README's and the performance page's.

``python -m benchmarks.published`` writes both again without measuring; `make bench` does it at its end.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import newest_results

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"
UNITS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}
_TIME = re.compile(r"(\d[\d.]*) (µs|ms|s)\b")
MPI = ("MPICH", "Open MPI")


@dataclass(frozen=True, slots=True)
class Row:
    """One published row, and the rows of the results that it is taken from."""

    what: str
    """What was measured, in a reader's words."""
    section: str
    """Heading in the results."""
    labels: tuple[str, ...]
    """First cells of its rows there."""
    peers: Mapping[str, tuple[str, ...]]
    """Names to show, each with how its entries in the results begin: the quickest one is shown."""


_FIRST, _EMPTY = "From nothing to four ranks", "An empty cell on four running ranks"
_NAMED, _MADE = (
    "A 64 MB array of the notebook on four ranks",
    "An array that is made, filled, shared, and read by four processes",
)
_FOUR = "Operations between 4 ranks"
FIRST_CELL = Row(
    "first cell of a fresh kernel, until four ranks have printed",
    _FIRST,
    (
        "first `%%parallel -n 4` on a fresh kernel, right after loading, until its output",
        "the same, beside Dask",
    ),
    {"ipyparallel": ("ipyparallel",), "Dask": ("Dask",)},
)
NEW_ARRAY = Row(
    "cell that names a new 64 MB array, memory reused",
    _NAMED,
    ("first cell that names it, beside Dask",),
    {"Dask `scatter`": ("Dask `scatter",)},
)
SAME_ARRAY = Row(
    "the same array in a later cell",
    _NAMED,
    ("a later cell, beside Dask",),
    {"Dask `submit`": ("Dask `submit",)},
)
LARGE_SUM = Row(
    "`all_reduce` of 64 MB, shared / private arrays",
    _FOUR,
    ("all_reduce, 64 MB",),
    {"MPI": MPI, "gloo": ("gloo",)},
)
SMALL_SUM = Row(
    "`all_reduce` of 8 bytes, shared / private arrays",
    _FOUR,
    ("all_reduce, 8 B",),
    {"MPI": MPI, "gloo": ("gloo",)},
)
OF_README = (FIRST_CELL, NEW_ARRAY, SAME_ARRAY, LARGE_SUM, SMALL_SUM)
OF_PAGE = (
    FIRST_CELL,
    Row(
        "empty cell on running ranks",
        _EMPTY,
        ("`%%parallel` in a kernel",),
        {"ipyparallel": ("ipyparallel",)},
    ),
    NEW_ARRAY,
    SAME_ARRAY,
    Row(
        "1 GB made by one process, read by four",
        _MADE,
        ("1 GB",),
        {
            "Ray": ("Ray",),
            "torch queue": ("torch queue",),
            "`shared_memory`": ("`multiprocessing.shared_memory`",),
            "joblib": ("joblib",),
        },
    ),
    LARGE_SUM,
    SMALL_SUM,
    Row(
        "64 MB array through a queue",
        "Messages of processes",
        ("private 64 MB, Queue",),
        {"torch": ("torch",), "multiprocessing": ("multiprocessing",), "joblib": ("joblib",)},
    ),
    Row(
        "25 MB batch from a loader with two workers",
        "Batches of a loader with 2 workers",
        ("25 MB a batch, as they are",),
        {"torch": ("torch",)},
    ),
    Row(
        "step of DistributedDataParallel, 11.7 million parameters",
        "torch.distributed: nbparallel and gloo",
        ("a step of DDP, 11.7 M parameters, 4 ranks",),
        {"gloo": ("gloo",)},
    ),
)


def shown(seconds: float) -> str:
    """Write a time with two digits, three from 100 on.

    >>> shown(0.9614), shown(0.0274), shown(0.1134), shown(72.8e-6), shown(1.3e-3), shown(7.54)
    ('0.96 s', '27 ms', '113 ms', '73 µs', '1.3 ms', '7.5 s')
    """
    unit = "s" if seconds >= 0.9 else "ms" if seconds >= 1e-3 else "µs"
    value = seconds / UNITS[unit]
    digits = 0 if value >= 9.95 else 1 if value >= 0.995 else 2
    return f"{value:.{digits}f} {unit}"


def seconds_in(text: str) -> float:
    """Return the first time that a text holds."""
    found = _TIME.search(text)
    if found is None:
        raise ValueError(f"no time in {text!r}")
    return float(found[1]) * UNITS[found[2]]


def _rows(results: str, section: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield label and cells by column of each row of a section's first table."""
    body = results.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in body.splitlines() if line.startswith("|")]
    head = [cell.strip() for cell in lines[0]]
    for cells in lines[2:]:
        yield cells[0].strip(), dict(zip(head[1:], (cell.strip() for cell in cells[1:]), strict=False))


def measured(results: str, row: Row) -> tuple[list[float], dict[str, float]]:
    """Return our times in seconds, and those of peers by name."""
    ours: list[float] = []
    peers: dict[str, list[float]] = {}
    for label, cells in _rows(results, row.section):
        if label not in row.labels:
            continue
        kinds = ("shared", "private") if "shared" in cells else ("nbparallel",)
        ours = ours or [seconds_in(cells[kind]) for kind in kinds]
        texts = {**cells, cells.get("peer", ""): cells.get("peer", "")}
        for name, beginnings in row.peers.items():
            for key, text in texts.items():
                if key.startswith(beginnings) and _TIME.search(text):
                    peers.setdefault(name, []).append(seconds_in(text))
    if not ours or set(peers) != set(row.peers):
        raise ValueError(f"the results lack {row.section!r}, {row.labels}, or one of {[*row.peers]}")
    return ours, {name: min(peers[name]) for name in row.peers}


def table(results: str, rows: Sequence[Row]) -> str:
    """Return the table of some rows, in Markdown."""
    lines = ["| | nbparallel | others |", "|---|---|---|"]
    for row in rows:
        ours, peers = measured(results, row)
        beside = ", ".join(f"{name} {shown(seconds)}" for name, seconds in peers.items())
        lines.append(f"| {row.what} | {_together(ours)} | {beside} |")
    return "\n".join(lines)


def _together(times: Sequence[float]) -> str:
    texts = [shown(seconds) for seconds in times]
    units = {text.split()[1] for text in texts}
    if len(units) == 1:
        return " / ".join(text.split()[0] for text in texts) + f" {units.pop()}"
    return " / ".join(texts)


def machine_line(path: Path, results: str) -> str:
    """Say when and on which machine the results were taken."""
    found = re.search(r"^Machine: (.*?);(.*)\.$", results, re.MULTILINE)
    if found is None:
        raise ValueError(f"{path} does not name its machine")
    peers = re.findall(r" (ipyparallel|torch|joblib|ray|distributed) ([\d.+a-z]+)", found[2])
    versions = ", ".join(f"{name} {version.partition('+')[0]}" for name, version in peers)
    mpi = re.findall(r"(MPICH|Open MPI)(?: Version)?:? +(?:Open MPI )?v?(\d[\d.]*\d)", results)
    libraries = ", ".join(dict.fromkeys(f"{name} {version}" for name, version in mpi))
    return f"`make bench`, {path.stem}: {found[1]}. Beside: {versions}, {libraries}."


def renewed(page: str, made: str) -> str:
    """Return a page with other text between its two comments.

    Raises
    ------
    ValueError
        The page lacks one of the comments.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"the page lacks {BEGIN!r} and {END!r}, between which its figures stand")
    return f"{before}{begin}\n{made}\n{end}{after}"


def pages(path: Path | None = None) -> dict[Path, str]:
    """Return the pages with figures as the results make them."""
    path = path or newest_results()
    results = path.read_text()
    performance, readme = ROOT / "docs" / "explanation" / "performance.md", ROOT / "README.md"
    made = f"{table(results, OF_PAGE)}\n\n{machine_line(path, results)}"
    return {
        performance: renewed(performance.read_text(), made),
        readme: renewed(readme.read_text(), table(results, OF_README)),
    }


def main() -> int:
    """Write the pages."""
    for page, text in pages().items():
        page.write_text(text)
        print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
