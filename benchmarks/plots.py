"""Pictures of all_reduce, drawn from the tables of the page: latency and bus bandwidth over size.

``python -m benchmarks.plots`` draws those of the newest results again; `make bench` does it at its end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.report import newest_results

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images" / "explanation"
UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
CURVES = ("shared", "private", "gloo", "MPICH", "Open MPI")
"""Columns of the table; those of nbparallel first."""
STYLE = """
    .card { fill: #ffffff; }
    .grid { stroke: #d0d7de; stroke-width: 1; }
    polyline { fill: none; stroke-width: 1.6; stroke-dasharray: 6 4; }
    .shared, .private { stroke-width: 2.8; stroke-dasharray: none; }
    .shared { stroke: #2563eb; } .private { stroke: #60a5fa; } .gloo { stroke: #b45309; }
    .mpich { stroke: #15803d; } .openmpi { stroke: #9333ea; }
    text { font: 13px "DejaVu Sans", "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
    .title { font-weight: bold; } .middle { text-anchor: middle; } .end { text-anchor: end; }
    @media (prefers-color-scheme: dark) {
      .card { fill: #161b22; } .grid { stroke: #30363d; } text { fill: #e6edf3; }
    }
"""
WIDTH, HEIGHT, LEFT, TOP = 330, 240, 62, 46
Points = list[tuple[float, float]]


def curves(page: str, ranks: int) -> dict[str, Points]:
    """Return bytes and seconds of every all_reduce that a table of the page holds, by library."""
    section = page.partition(f"## Operations between {ranks} ranks\n")[2].partition("\n## ")[0]
    found: dict[str, Points] = {name: [] for name in CURVES}
    for size, cells in re.findall(r"^\| all_reduce, (\d+ [KM]?B) \|(.*)\|$", section, re.MULTILINE):
        for name, cell in zip(CURVES, cells.split("|"), strict=False):
            if cell.strip() != "–":
                found[name].append((_number(size), _number(cell)))
    return {name: points for name, points in found.items() if points}


def _number(text: str) -> float:
    value, unit = text.split()
    return float(value) * UNITS[unit]


def picture(ranks: int, by_name: dict[str, Points]) -> str:
    """Return the picture; bus bandwidth as nccl-tests define it: S/t · 2(N−1)/N."""
    factor = 2 * (ranks - 1) / ranks / 1e9
    latency = {name: [(size, t * 1e6) for size, t in points] for name, points in by_name.items()}
    bandwidth = {name: [(size, size / t * factor) for size, t in points] for name, points in by_name.items()}
    title = f"all_reduce on {ranks} ranks"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * (WIDTH + LEFT) + 30} {HEIGHT + 130}" '
        'role="img" aria-labelledby="title desc">',
        f'<title id="title">{title}: latency and bus bandwidth</title>',
        '<desc id="desc">Both over the size of the array, with logarithmic scales; the figures stand in the '
        "table.</desc>",
        f"<style>{STYLE}</style>",
        '<rect class="card" width="100%" height="100%"/>',
        *_panel(LEFT, f"{title}: time (µs)", latency),
        *_panel(2 * LEFT + WIDTH + 10, "bus bandwidth (GB/s)", bandwidth),
    ]
    x, y = LEFT, HEIGHT + TOP + 62
    for name in by_name:
        label = f"nbparallel, {name}" if name in CURVES[:2] else name
        parts.append(f'<polyline class="{_class(name)}" points="{x},{y} {x + 24},{y}"/>')
        parts.append(f'<text x="{x + 30}" y="{y + 4}">{label}</text>')
        x += 64 + 8 * len(label)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(left: int, title: str, by_name: dict[str, Points]) -> Iterator[str]:
    """Yield one diagram; all points lie on or between its grid's powers of ten."""
    every = [point for points in by_name.values() for point in points]
    sizes = sorted({size for size, _ in every})
    low, high = (math.log10(f(y for _, y in every)) for f in (min, max))
    bottom, top = math.floor(low), math.ceil(high)
    x_of = _scale(math.log(sizes[0]), math.log(sizes[-1]), left, left + WIDTH)
    y_of = _scale(bottom, top, TOP + HEIGHT, TOP)
    yield f'<text class="title" x="{left}" y="{TOP - 18}">{title}</text>'
    for power in range(bottom, top + 1):
        y = y_of(power)
        yield f'<path class="grid" d="M{left} {y}h{WIDTH}"/>'
        yield f'<text class="end" x="{left - 6}" y="{y + 4}">{10.0**power:,.{max(0, -power)}f}</text>'
    for size, following in zip(sizes, [*sizes[1:], math.inf], strict=True):
        if following < sizes[-1] * 2 and following / size < 8:
            continue  # no room for both
        yield f'<text class="middle" x="{x_of(math.log(size))}" y="{TOP + HEIGHT + 20}">{_human(size)}</text>'
    for name, points in by_name.items():
        places = " ".join(f"{x_of(math.log(size))},{y_of(math.log10(y))}" for size, y in points)
        yield f'<polyline class="{_class(name)}" points="{places}"/>'


def _scale(low: float, high: float, first: int, last: int) -> Callable[[float], float]:
    return lambda value: round(first + (value - low) / (high - low) * (last - first), 1)


def _class(name: str) -> str:
    return name.lower().replace(" ", "")


def _human(size: float) -> str:
    unit = next(unit for unit in ("MB", "KB", "B") if size >= UNITS[unit])
    return f"{size / UNITS[unit]:g} {unit}"


def pictures(page: str, ranks: Sequence[int] = (2, 4)) -> dict[str, str]:
    """Return the pictures of a page by their files' names."""
    found = {n: curves(page, n) for n in ranks}
    return {f"all_reduce-{n}.svg": picture(n, by_name) for n, by_name in found.items() if by_name}


def main() -> None:
    """Draw what the page shows."""
    for name, svg in pictures(newest_results().read_text()).items():
        (FOLDER / name).write_text(svg)
        print(FOLDER / name)


if __name__ == "__main__":
    main()
