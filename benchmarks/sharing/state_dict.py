"""Tensors of the notebook on four ranks: a state dict of 300 MB as a name, and a shared module."""

from __future__ import annotations

import statistics

from benchmarks.notebook import TIMER, answer
from benchmarks.notebook import run as run_cell
from benchmarks.report import Figure, Section, human_seconds, installed, spread
from nbparallel.testing.kernel import Kernel

FIRST_AIM, LATER_AIM, SHARED_AIM = 0.15, 0.06, 0.3e-3

PREPARE = """
import torch
import nbparallel as nbp

COUNT, SIZE = 75, 1_000_000          # float32: 4 MB each, 300 MB
def tensors():
    return {f"layer{i}.weight": torch.full((SIZE,), float(i)) for i in range(COUNT)}
def arrays():
    return {name: tensor.numpy() for name, tensor in tensors().items()}
state, plain = tensors(), arrays()

empty = magic("parallel", "", "pass")
naming = magic("parallel", "", "n = len(state)")
naming_plain = magic("parallel", "", "n = len(plain)")
def first_time():
    global state
    state = tensors()               # memory of its own, all pages touched
    started = time.perf_counter()
    naming()
    return time.perf_counter() - started
def first_time_plain():
    global plain
    plain = arrays()
    started = time.perf_counter()
    naming_plain()
    return time.perf_counter() - started

small = torch.nn.Linear(1000, 1000)
large = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(50)))
nbp.share(small)
nbp.share(large)
naming_small = magic("parallel", "", "n = small.bias is None")
naming_large = magic("parallel", "", "n = large[0].bias is None")
"""
CHECK = """
get_ipython().run_cell_magic("parallel", "-o sums", "[float(t.sum()) for t in state.values()]")
assert all(each == [float(t.sum()) for t in state.values()] for each in sums)
get_ipython().run_cell_magic("parallel", "-r 1", "with torch.no_grad(): large[3].weight[5, 7] = 123.0")
get_ipython().run_cell_magic("parallel", "-o seen", "float(large[3].weight[5, 7])")
assert list(seen) == [123.0] * 4 and float(large[3].weight[5, 7].detach()) == 123.0
"""


def run(*, quick: bool) -> Section:
    """Measure in one kernel, taking turns with a dict of numpy arrays of the same size."""
    title = "Tensors of the notebook on four ranks"
    if not installed("torch"):
        return Section(title, [], "torch is not installed.")
    with Kernel() as kernel:
        for code in ("%load_ext nbparallel", "%%parallel -n 4\nimport torch", TIMER, PREPARE, CHECK):
            run_cell(kernel, code)
        turns = f"take_turns({3 if quick else 9}, torch=first_time, numpy=first_time_plain)"
        first = answer(kernel, f"print({turns})", timeout=300)
        run_cell(kernel, "naming(); naming_plain()")
        turns = f"take_turns({5 if quick else 25}, torch=naming, numpy=naming_plain)"
        later = answer(kernel, f"print({turns})", timeout=300)
        cells = f"{30 if quick else 200}, empty=empty, small=naming_small, large=naming_large"
        shared = answer(kernel, f"naming_small(); naming_large(); print(take_turns({cells}))")
        run_cell(kernel, "%parallel_stop")
    rows = []
    for what, times, aim in (
        ("state dict of 300 MB, first cell that names it", first, FIRST_AIM),
        ("every later cell", later, LATER_AIM),
    ):
        ours, numpy = statistics.median(times["torch"]), statistics.median(times["numpy"])
        peer = f"numpy arrays in a dict: {spread(times['numpy'])}"
        rows.append(
            Figure(what, spread(times["torch"]), peer, numpy / ours, f"≤ {human_seconds(aim)}", ours <= aim)
        )
    for name, size in (("small", "4 MB"), ("large", "200 MB")):
        cost = max(0.0, statistics.median(shared[name]) - statistics.median(shared["empty"]))
        rows.append(
            Figure(
                f"shared module of {size}, a cell that names it, on top of an empty one",
                human_seconds(cost),
                aim=f"≤ {human_seconds(SHARED_AIM)}",
                met=cost <= SHARED_AIM,
            )
        )
    return Section(
        title,
        rows,
        "75 tensors of 4 MB. Before a first cell all of them are new. A module is shared once by "
        "`nbp.share(module)`; the bigger one has 50 layers.",
    )
