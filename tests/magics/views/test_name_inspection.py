"""The magics that show what is there, in a real kernel: their words, their HTML, and what they leave."""

from __future__ import annotations

import re

import pytest

from tests.harness.kernel import CellOutcome, Kernel

pytestmark = pytest.mark.time_limit(90)


def shown(outcome: CellOutcome) -> str:
    """Return the text of the one table that a cell shows; its HTML has the same words."""
    assert outcome.status == "ok", outcome.traceback
    (display,) = outcome.displays
    html = re.sub(r"<[^>]*>", " ", display["text/html"])
    words = re.findall(r"\w+", display["text/plain"].replace(": with --all", ""))
    assert set(words) <= set(re.findall(r"\w+", html)), "text and HTML tell the same"
    return str(display["text/plain"])


def loaded(kernel: Kernel, *, prestarted: bool = True) -> Kernel:
    """Load the extension; `warm`: with what it starts in the background."""
    switched = f"get_ipython().config.NbParallel.warm = {prestarted}\n"
    assert kernel.run(f"{switched}%load_ext nbparallel\nimport numpy as np, nbparallel as nbp").status == "ok"
    return kernel


@pytest.mark.slow
def test_segments_before_and_with_ranks(kernel: Kernel) -> None:
    """`%parallel_segments` starts no rank; with ranks it names who uses which name, view and strategy."""
    loaded(kernel, prestarted=False)
    assert "0 segments" in shown(kernel.run("%parallel_segments"))
    assert kernel.descendants() == []
    kernel.run("x = np.ones(1 << 17)\nview = x[::2]")
    kernel.run("%%parallel -n 2\nx.sum();")
    kernel.run("%%rank 1\nmine = nbp.zeros(1 << 18)\npart = x[5:]")
    text = shown(kernel.run("%parallel_segments"))
    lines = [re.split(r"\s{2,}", line) for line in text.splitlines()]
    assert lines[:4] == [
        ["shared memory: 3.0 MiB in 2 segments"],
        ["array", "MiB", "size", "used by", "may write", "made by"],
        ["mine", "2.0", "█" * 10, "rank 1", "all", "itself"],
        ["view, x, part (rank 1)", "1.0", "█" * 5, "notebook, ranks 0-1", "notebook", "notebook"],
    ]
    assert re.fullmatch(r"all file_descriptor · [\d.]+ GiB more would fit", text.splitlines()[4])
    mine, x = (
        re.split(r"\s{2,}", line) for line in shown(kernel.run("%parallel_segments --all")).splitlines()[2:4]
    )
    assert mine[:-1] == ["mine", "2.0", "█" * 10, "rank 1", "all", "file_descriptor", "rank 1", "live"]
    assert int(mine[-1], 16) > 1
    assert x[-3:] == ["notebook", "live", "0x1"]


@pytest.mark.slow
def test_the_doctor_starts_nothing(kernel: Kernel) -> None:
    """`%parallel_doctor` works before there are ranks and while there are, and starts none."""
    loaded(kernel, prestarted=False)
    text = shown(kernel.run("%parallel_doctor"))
    assert text.startswith("this machine: ")
    every = shown(kernel.run("%parallel_doctor --all"))
    for subject in ("starting ranks", "sharing strategies", "/dev/shm", "open files", "CPUs", "versions"):
        assert f"\n{subject}  " in every
    assert "checks passed: ranks start by forkserver · " in text
    assert kernel.descendants() == []
    kernel.run("%%parallel -n 2\nx = 1")
    before = {record.pid for record in kernel.descendants()}
    assert "ipykernel" in shown(kernel.run("%parallel_doctor --all"))
    assert {record.pid for record in kernel.descendants()} == before


@pytest.mark.slow
def test_who_has_which_name(shared_kernel: Kernel) -> None:
    """`%parallel_who` tells shared, copied, made on ranks and different, with what only the notebook has."""
    kernel = loaded(shared_kernel)
    assert "no ranks are running" in kernel.run("%parallel_who").stdout
    kernel.run("x = np.ones((6, 2))\nwords = ['a'] * 3\nunused = 1\ndef double(a): return 2 * a")
    kernel.run(
        "%%parallel -n 3\npart = np.array_split(x, 3)[rank]\nwords, double\nmixed = 1 if rank else 'one'"
    )
    kernel.run("%%rank 2\nalone = {}")
    text = shown(kernel.run("%parallel_who"))
    assert text.splitlines()[0] == "6 names on ranks 0-2"
    rows = [re.split(r"\s{2,}", line) for line in text.splitlines()[1:-1]]
    assert rows == [
        ["how", "names", "which", "B"],
        ["differs between ranks", "1", "mixed (rank 0: str of 3; ranks 1-2: int)"],
        ["shared, ranks read", "1", "x (6, 2) float64", "96"],
        ["copied", "2", "double function, words list of 3"],
        ["made on ranks", "1", "part (2, 2) float64, part of x", "96"],
        ["made on ranks, only on rank 2", "1", "alone dict of 0"],
        ["only in the notebook", "1", "unused"],
    ]
    assert text.splitlines()[-1] == "only in the notebook: until a cell for ranks names them"
    kernel.run("x = x[1:]\n%share x")
    changed = "%%parallel -r 1\nwords[0] = 'z'; double = 3"
    assert kernel.run(changed).status == "ok"
    text = shown(kernel.run("%parallel_who"))
    assert re.search(r"\nshared, older than the notebook's +1  x \(6, 2\) float64 \(here ", text)
    assert re.search(r"\ncopied, changed on rank 1 +1  words ", text)
    assert "double (ranks 0, 2: function, copied; rank 1: int, made there)" in text


@pytest.mark.slow
def test_measuring_strategies(kernel: Kernel) -> None:
    """`%sharing_strategy --bench` shows tables; without ranks it starts one, and ends it."""
    loaded(kernel, prestarted=False)
    outcome = kernel.run("%sharing_strategy --bench --seconds 1", timeout=60)
    assert outcome.status == "ok", outcome.traceback
    assert outcome.stdout == "measuring every strategy on a rank for about 1 s; interrupt to stop\n"
    (tables,) = outcome.displays
    for name in ("file_descriptor", "file_system", "file_region", "mmap", "copy"):
        assert f"\n{name} " in tables["text/plain"]
        assert f"{name}</th>" in tables["text/html"]
    assert "medians of" in tables["text/plain"]
    assert kernel.descendants() == []
    kernel.run("import sys")
    state = kernel.run("nbp.get_sharing_strategy(), nbp.segments() == (), 'matplotlib.pyplot' in sys.modules")
    assert state.result == "('file_descriptor', True, False)"


@pytest.mark.slow
def test_an_interrupted_measurement_leaves_nothing(kernel: Kernel) -> None:
    """The stop button ends it as a KeyboardInterrupt; no segment, no name, and no rank is left."""
    loaded(kernel, prestarted=False)
    kernel.run("%sharing_strategy file_system")
    cell = kernel.begin("%sharing_strategy --bench --seconds 60")
    cell.wait_for("measuring")
    kernel.wait_until(lambda: len(kernel.descendants()) >= 3, 30, "a rank")
    kernel.interrupt()
    outcome = cell.wait(30)
    assert outcome.ename == "KeyboardInterrupt"
    assert "measurement.py" not in outcome.traceback
    assert kernel.run("nbp.segments() == (), nbp.get_sharing_strategy()").result == "(True, 'file_system')"
    assert kernel.descendants() == []


@pytest.mark.slow
def test_looking_while_ranks_are_busy(kernel: Kernel) -> None:
    """Behind a cell that runs in the background every table comes at once, and says who was not asked."""
    loaded(kernel)
    kernel.run("x = np.ones(1 << 17)")
    kernel.run("%%parallel -n 3\ny = x.sum()")
    kernel.run("%%parallel -r 0-1 --async\nimport time; time.sleep(5)")
    who = shown(kernel.run("%parallel_who"))
    assert who.startswith("2 names on rank 2\n")
    assert who.endswith("busy with a cell, and not asked: ranks 0-1")
    assert "notebook, ranks 0-2" in shown(kernel.run("%parallel_segments"))
    assert "computing" in shown(kernel.run("%parallel_status"))
    refused = kernel.run("%sharing_strategy --bench")
    assert refused.ename == "BusyError"
    assert "measurement.py" not in refused.traceback
    assert kernel.run("%parallel_stop").status == "ok"
