"""Pictures of all_reduce: latency and bus bandwidth over size, one line a contender."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.lines import SIZES, Line

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "explanation" / "img"


def draw(
    ranks: int,
    seconds: Mapping[str, Mapping[str, float]],
    mpi: Callable[[Line], Mapping[str, float]],
    folder: Path = FOLDER,
) -> Path:
    """Write the picture for one number of ranks; bus bandwidth as nccl-tests define it: S/t · 2(N−1)/N."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    curves: dict[str, list[tuple[int, float]]] = {}
    for size in SIZES:
        line = Line("all_reduce", size)
        measured = seconds.get(line.key, {})
        named = {f"nbparallel, {name}": measured[name] for name in ("shared", "private") if name in measured}
        if "gloo" in measured:
            named["gloo"] = measured["gloo"]
        for name, value in (named | dict(mpi(line))).items():
            curves.setdefault(name, []).append((size, value))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, points in curves.items():
        style = {"linewidth": 2.2} if name.startswith("nbparallel") else {"linewidth": 1, "linestyle": "--"}
        sizes = [size for size, _ in points]
        left.loglog(sizes, [value * 1e6 for _, value in points], marker="o", ms=3, label=name, **style)
        factor = 2 * (ranks - 1) / ranks / 1e9
        right.loglog(sizes, [size / value * factor for size, value in points], marker="o", ms=3, **style)
    left.set(title=f"all_reduce, {ranks} ranks: latency", xlabel="bytes", ylabel="µs")
    right.set(title="bus bandwidth", xlabel="bytes", ylabel="GB/s")
    for axes in (left, right):
        axes.grid(visible=True, which="major", alpha=0.3)
    left.legend(frameon=False, fontsize=8)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"all_reduce-{ranks}.svg"
    with matplotlib.rc_context({"svg.hashsalt": "nbparallel"}):
        figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path
