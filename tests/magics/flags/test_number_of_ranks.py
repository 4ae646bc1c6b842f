"""How many ranks there are: what is refused, and what is said about it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.kernel import Kernel


@pytest.fixture
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process use two CPUs, as far as the session knows."""
    monkeypatch.setattr("nbparallel.session.processes.launch.usable_cpus", lambda: 2)


@pytest.mark.usefixtures("two_cpus")
def test_many_more_ranks_than_cpus_are_refused(notebook: Any) -> None:
    """With the reason and the line that allows them, before one is started; from a flag or the defaults."""
    for first in ("%%parallel -n 17\nx", "%config NbParallel.n = 17\n%parallel x"):
        out = notebook.run(first)
        assert out.stderr.count("\n") == 1
        assert out.stderr.startswith("UsageError: 17 ranks on 2 CPUs: ")
        assert "at most 16 are started here, 8 for each CPU" in out.stderr
        assert out.stderr.endswith("to insist: %config NbParallel.ranks_per_cpu = 9\n")
        assert notebook.sessions.made == []
    notebook.run("%config NbParallel.ranks_per_cpu = 9")
    assert notebook.run("%parallel x").error is None
    assert notebook.session.world_size == 17
    assert "19 ranks on 2 CPUs" in notebook.run("%%parallel -n 19\nx").stderr
    notebook.run("%config NbParallel.ranks_per_cpu = 1")
    assert notebook.run("%parallel x").error is None  # those that run are not ended by a setting


@pytest.mark.usefixtures("two_cpus")
def test_what_no_machine_can_hold_is_not_advised(notebook: Any) -> None:
    """A number beyond every limit is refused for that: the setting would not help."""
    assert "ranks do not fit this machine" in notebook.run("%%parallel -n 10000\nx").stderr


@pytest.mark.usefixtures("two_cpus")
def test_a_change_of_the_number_is_one_line(notebook: Any) -> None:
    """Below the cell that changed it; nothing where it stays, and nothing when the user's first -n starts."""
    assert notebook.run("%%parallel -n 2\nx").stdout == ""
    assert notebook.run("%%parallel -n 4\nx").stdout == "[nbparallel] 4 ranks from now on\n"
    assert notebook.run("%%parallel -n 4\nx").stdout == ""
    assert notebook.run("%%parallel -n 5 --quiet\nx").stdout == ""
    assert notebook.run("%%parallel\nx").stdout == "[nbparallel] 5 ranks from now on\n"


@pytest.mark.usefixtures("two_cpus")
def test_a_number_that_was_not_chosen_is_explained(notebook: Any) -> None:
    """Once, by the first cell without -n that starts ranks; not if `%config` sets a number."""
    notebook.run("%config NbParallel.welcome = True")
    notebook.run("%%parallel --quiet -r 5\nx")  # refused: rank 5 does not exist
    notebook.run("%%parallel -r 5\nx")
    said = "[nbparallel] 2 CPUs, so 2 ranks; -n sets another number\n"
    assert notebook.run("%%parallel\nx").stdout.count(said) == 1
    assert said not in notebook.run("%%parallel\nx").stdout
    notebook.run("%parallel_stop\n%config NbParallel.n = 2")
    assert notebook.run("%%parallel\nx").stdout == ""
    notebook.run("%parallel_stop\n%config NbParallel.n = 0")
    assert notebook.run("%%parallel -n 2\nx").stdout == ""


@pytest.mark.slow
def test_the_lines_stand_above_the_output_of_real_ranks(shared_kernel: Kernel) -> None:
    """`-n 3` after two ranks, `--share`: a line each, the first time."""
    kernel = shared_kernel
    start = "%load_ext nbparallel\n%config NbParallel.welcome = False\nimport numpy as np\na = np.zeros(3)"
    assert kernel.run(f"{start}\n%parallel -n 2 1;").status == "ok"
    grown = kernel.run("%%parallel -n 3 --share a\na[rank] = 1\nall_reduce(1)")
    assert grown.stdout == (
        "[nbparallel] 3 ranks from now on\n[nbparallel] ranks may write a from now on; "
        "what you assign to the name later is read-only again\nOut[ranks 0-2]: 3\n"
    )
    again = kernel.run("%%parallel -n 3 --share a\na[rank] += 1")
    assert (again.stdout, kernel.run("a.tolist()").result) == ("", "[2.0, 2.0, 2.0]")
