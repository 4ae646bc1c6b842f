"""``?`` of names that the notebook does not have."""

from __future__ import annotations

import pytest

from tests.harness.kernel import Kernel

pytestmark = pytest.mark.time_limit(90)


def shown(kernel: Kernel, code: str) -> str:
    """Return what a cell prints."""
    outcome = kernel.run(code)
    assert outcome.status == "ok", outcome.traceback
    return "".join(m.printed for m in outcome.messages)


@pytest.mark.slow
def test_names_of_ranks_have_help_in_the_notebook(shared_kernel: Kernel) -> None:
    """Operations and the other predefined names, before ranks run as well; what ranks assigned, by its type.

    IPython reads ``%parallel dist.lock?`` as a question about ``dist.lock`` to the notebook.
    """
    kernel = shared_kernel
    assert kernel.run("%load_ext nbparallel\n%config NbParallel.welcome = False").status == "ok"
    ask = "print(get_ipython().object_inspect_mime({!r})['text/plain'])"
    assert "Return the lock of this name" in shown(kernel, ask.format("dist.lock"))
    assert "api/reductions.py" in shown(kernel, ask.format("all_reduce"))
    assert "world_size: how many ranks" in shown(kernel, ask.format("world_size"))
    for line in ("%parallel dist.lock?", "dist.all_reduce?", "all_reduce??", "nbp.Session?"):
        assert "not found" not in shown(kernel, line), line
    assert "Object `mine` not found." in shown(kernel, "mine?")
    assert kernel.run("%%parallel -n 2\nmine = [1, 2] if rank else 3").status == "ok"
    said = shown(kernel, ask.format("mine.append"))
    assert "mine: int on rank 0; list of 2 on rank 1" in said
    assert "-o name" in said
    assert "not found" not in shown(kernel, "mine?")
    assert "Object `nothing` not found." in shown(kernel, "nothing?")
    assert "on rank" not in shown(kernel, "mine = 5\n" + ask.format("mine")), "the notebook has it now"
    assert kernel.run("%unload_ext nbparallel").status == "ok"
    assert "Object `all_reduce` not found." in shown(kernel, "all_reduce?")


@pytest.mark.slow
def test_a_missing_name_that_ranks_have_is_found(shared_kernel: Kernel) -> None:
    """A line below the NameError says that ranks have the name, and what to write; no line about others."""
    kernel = shared_kernel
    assert kernel.run("%load_ext nbparallel\n%config NbParallel.welcome = False").status == "ok"
    assert kernel.run("%%parallel -n 2\nbest = rank / 2").status == "ok"

    def below(code: str) -> str:
        outcome = kernel.run(code)
        assert "NameError" in "".join(outcome.traceback)
        return "".join(m.printed for m in outcome.messages)

    for code, name in (
        ("print(rank)", "rank"),
        ("all_reduce(3)", "all_reduce"),
        ("(lambda: dist.shard)()", "dist"),
    ):
        line = f"[nbparallel] ranks have {name}, the notebook does not: begin this cell with `%%parallel`\n"
        assert below(code) == line
    assert below("nbp.zeros(3)") == (
        "[nbparallel] ranks have nbp by themselves, the notebook does not: write `import nbparallel as nbp`\n"
    ), "an array that a cell for ranks makes is another one on each"
    line = "[nbparallel] only ranks have best: float on ranks 0-1; "
    assert below("best + 1") == f"{line}`%parallel -o best best` puts the list of their values here\n"
    assert kernel.run("%parallel -o best best\nassert best == [0, 0.5]\ndel best").status == "ok"
    assert kernel.run("%%parallel\nif rank: alone = 7").status == "ok"
    assert "`%parallel -r 1 -o alone alone` puts" in below("print(alone)"), "rank 0 has none"
    assert kernel.run("%parallel -r 1 -o alone alone\nassert alone[1] == 7").status == "ok"
    assert kernel.run("%%parallel\ndef twice(x): return 2 * x").status == "ok"
    assert below("twice(3)") == (
        "[nbparallel] only ranks have twice: function on ranks 0-1; "
        "one that a cell without `%%parallel` defines, both have\n"
    ), "a list of functions would not be what was called"
    assert below("nowhere") == ""
    assert below("%%parallel --local\nprint(rank)") == "", "it does begin with %%parallel"
    assert below("import types; exec('rank', vars(types.ModuleType('other')))") == "", (
        "not the cell's own name"
    )
    assert kernel.run("%parallel_stop").status == "ok"
    assert below("best") == ""
    assert kernel.run("%unload_ext nbparallel").status == "ok"
    assert below("rank") == ""
