"""What a benchmark returns, and how it is written down."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
PEERS = ("ipyparallel", "torch", "joblib", "ray", "distributed")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure, beside a peer's measured in the same run."""

    what: str
    """What was measured."""
    value: str
    """Ours, with its unit."""
    peer: str = "–"
    """The peer's name and figure; or that it is not installed."""
    ratio: float | None = None
    """How many times the peer's figure is ours; None: nothing to compare with."""
    aim: str = "–"
    """What we want of ours."""
    met: bool | None = None
    """Whether it is so; None: no aim."""


@dataclass(frozen=True, slots=True)
class Section:
    """The figures of one benchmark module."""

    title: str
    """Heading."""
    figures: Sequence[Figure]
    """Rows of its table."""
    notes: str = ""
    """How it was measured, in a sentence or two."""
    table: str = ""
    """Markdown to show instead of the figures' table, where there are many peers."""


def newest_results() -> Path:
    """Return the newest file of figures that `make bench` has written."""
    return max(RESULTS.glob("20*.md"))


def median_seconds(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Time every contender `rounds` times, taking turns (a machine's speed drifts); return all times.

    A first round of all is not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, call in contenders.items():
            started = time.perf_counter()
            call()
            if turn:
                times[name].append(time.perf_counter() - started)
    return times


def human_seconds(seconds: float) -> str:
    """Write a time with a fitting unit.

    >>> human_seconds(0.0123), human_seconds(4.2e-6), human_seconds(2)
    ('12.3 ms', '4.2 µs', '2.00 s')
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def spread(times: Sequence[float]) -> str:
    """Write the median of some times, and their range."""
    low, middle, high = min(times), statistics.median(times), max(times)
    return f"{human_seconds(middle)} ({human_seconds(low)} … {human_seconds(high)})"


def installed(peer: str) -> bool:
    """Return whether a peer can be measured."""
    try:
        importlib.metadata.version(peer)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def not_installed(peer: str) -> str:
    """Name a peer that cannot be measured, so that silence is not taken for a result."""
    return f"{peer}: not installed"


def machine() -> str:
    """Describe where the figures were measured."""
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor() or "unknown processor",
    )
    memory = next((int(line.split()[1]) // 2**20 for line in _lines("/proc/meminfo")), 0)
    versions = []
    for name in ("numpy", "ipython", "ipykernel", *PEERS):
        versions.append(f"{name} {importlib.metadata.version(name) if installed(name) else 'not installed'}")
    system = f"{platform.system()} {platform.release().split('-')[0]}, Python {platform.python_version()}"
    return f"{len(os.sched_getaffinity(0))} cores of {model}, {memory} GiB, {system}; {', '.join(versions)}"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def markdown(
    sections: Sequence[Section], command: str, *, title: str = "Measured figures", about: str = ""
) -> str:
    """Return the page of all figures; `about` is a paragraph before them."""
    parts = [
        f"# {title}",
        f"Written by `{command}` on {time.strftime('%Y-%m-%d')}.\nMachine: {machine()}.",
        *([about] if about else []),
        "Times are medians, with minimum and maximum in brackets. Peers ran in the same run, taking turns; "
        "results were checked before anything was timed. "
        "A ratio says how many times longer the peer took.",
    ]
    return "\n\n".join([*parts, *map(_text, sections)]) + "\n"


def replaced(page: str, section: Section) -> str:
    r"""Return the page of all figures with one section measured anew, which says so.

    >>> page = replaced("# All\n\n## A\n\nold\n\n## B\n\nkept\n", Section("A", (), "new", "| table |"))
    >>> "old" in page, page.index("| table |") < page.index("new") < page.index("## B"), page[-5:]
    (False, True, 'kept\n')

    Raises
    ------
    ValueError
        The page has no section of that title.
    """
    head, found, rest = page.partition(f"\n## {section.title}\n")
    if not found:
        raise ValueError(f"the page has no section {section.title!r}")
    _, following, rest = rest.partition("\n## ")
    when = f"Measured anew on {time.strftime('%Y-%m-%d')}: {machine().partition(';')[0]}."
    return f"{head}\n{_text(section)}\n\n{when}\n{following}{rest}"


def _text(section: Section) -> str:
    rows = [
        "| | nbparallel | peer | ratio | aim | |",
        "|---|---|---|---|---|---|",
        *(
            f"| {f.what} | {f.value} | {f.peer} | {f'{f.ratio:.1f} ×' if f.ratio else '–'} | {f.aim} "
            f"| {'' if f.met is None else 'met' if f.met else '**missed**'} |"
            for f in section.figures
        ),
    ]
    table = section.table or "\n".join(rows)
    return "\n\n".join([f"## {section.title}", table, *([section.notes] if section.notes else [])])
