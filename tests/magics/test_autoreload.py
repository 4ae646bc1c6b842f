"""``%autoreload 2`` in the notebook, which ranks that have imported a module do not follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.kernel import Kernel
from tests.magics.cells import printed, with_ranks


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_ranks_say_that_a_module_was_reloaded(shared_kernel: Kernel, tmp_path: Path) -> None:
    """A map and a cell say it, once for each edit; the ways work, and autoreload on ranks does without."""
    kernel, name = with_ranks(shared_kernel), f"of_{tmp_path.name}"  # a kernel runs several tests
    file = tmp_path / f"{name}.py"
    old = f"{name} is still the old code on ranks 0-1, which imported it before the last edit: "

    def edit(source: str) -> None:
        file.write_text(source)  # of another length each time: CPython's cache looks at seconds

    def say(cell: str) -> str:
        outcome = kernel.run(cell.replace("helping", name))
        assert outcome.status == "ok", outcome.traceback
        return printed(outcome)

    edit("def f(x): return x + 1\n")
    say(
        f"import sys, nbparallel as nbp\nsys.path.insert(0, {str(tmp_path)!r})\nimport helping\n"
        "from helping import f\n%load_ext autoreload\n%autoreload 2"
    )
    assert say("%parallel helping.f(1) == 2 or 1 / 0;") == ""
    edit("def f(x): return x + 100\n")
    assert old in say("print(nbp.map(helping.f, [1], progress=False))")
    assert say("%parallel helping.f(1) == 2 or 1 / 0;") == ""
    assert say("%%parallel\nimport importlib, helping; importlib.reload(helping);") == ""
    assert say("assert nbp.map(helping.f, [1], progress=False) == [101]") == ""

    edit("def f(x): return x + 1000\n")
    said = say("%parallel f(1) == 101 or 1 / 0;")
    assert old in said
    assert "`%parallel_restart` does for what was imported from it, too" in said
    say("%parallel_restart")
    assert say("%parallel f(1) == helping.f(1) == 1001 or 1 / 0;") == ""

    assert say("%%parallel\n%load_ext autoreload\n%autoreload 2") == ""
    edit("def f(x): return -x\n")
    assert say("%parallel f(1) == helping.f(1) == -1 or 1 / 0;") == ""
