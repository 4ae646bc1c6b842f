"""What a cell says about names that are not what they look like."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed.api.operation_base import PREDEFINED
from nbparallel.session import Session
from nbparallel.session.names.delivery import PREDEFINED_NAMES

BACK = "brings that back"


def test_the_notebook_knows_the_names_of_ranks() -> None:
    """Its own list of what ranks find defined is theirs."""
    assert {"rank", "world_size", "rng", "nbp", "dist", *PREDEFINED} == PREDEFINED_NAMES


class Notebook:
    """Three ranks and a notebook; `say` runs a cell and returns its notes."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.names: dict[str, Any] = {"__name__": "__main__"}

    def type(self, source: str) -> None:
        """Run code in the notebook."""
        exec(source, self.names)

    def say(self, cell: str) -> list[str]:
        """Run a cell; return its notes."""
        return list(self.session.run(cell, namespace=self.names).notes)

    def values(self, cell: str) -> list[Any]:
        """Run a cell; return the values."""
        return list(self.session.run(cell, namespace=self.names).values)


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """Return a session of three ranks."""
    with Session(3) as session:
        session.run("pass", namespace={})  # the control segment is there before the first leak check
        yield session


@pytest.fixture
def notebook(session: Session) -> Iterator[Notebook]:
    """Return a notebook; ranks forget its names afterwards."""
    notebook = Notebook(session)
    yield notebook
    notebook.names.clear()
    session.run("%reset -f", namespace=notebook.names)


@pytest.mark.slow
def test_a_rank_of_the_notebook_is_named_by_each_cell_that_uses_it(notebook: Notebook) -> None:
    """Also through the notebook's functions; cells without it say nothing; ``del`` brings the rank's back."""
    notebook.type("import numpy as np\nrank = np.linalg.matrix_rank(np.eye(3))\ndef f(): return rank")
    said = (
        "rank is the notebook's (3), not the rank's number, which is dist.get_rank(): `del rank` in the "
        "notebook brings that back"
    )
    assert notebook.say("rank % 3") == [said]
    assert notebook.say("f()") == [said]
    assert notebook.say("dist.get_rank()") == []
    assert notebook.say("rank") == [said]
    notebook.type("del rank")
    assert notebook.values("rank") == [0, 1, 2]
    assert notebook.say("rank") == []


def test_a_number_that_is_the_ranks_own_is_no_mistake(notebook: Notebook) -> None:
    """Only the ranks that see another number than their own say so."""
    notebook.type("import numpy as np; rank = np.int64(1); world_size = 3")
    (said,) = notebook.say("rank, world_size")
    assert said.startswith("rank is the notebook's (1), ")


def test_other_names_are_noted_once_for_each_value(notebook: Notebook) -> None:
    """An operation, `dist`, `rng`; modules were imported on purpose."""
    notebook.type("from functools import reduce\ndist = 'mine'\nimport math as nbp")
    assert notebook.say("reduce, nbp, dist") == [
        "dist is the notebook's ('mine'), not nbparallel.distributed: `del dist` in the notebook " + BACK,
        "reduce is the notebook's, not the operation, which is nbp.distributed.reduce: `del reduce` in the "
        f"notebook {BACK}",
    ]
    assert notebook.say("reduce, dist") == []
    notebook.type("reduce = 5")
    assert notebook.say("reduce, dist")[0].startswith("reduce is the notebook's (5), not the operation")


@pytest.mark.parametrize(
    "cell", ["rank = 9", "for rank in range(10): pass", "def f():\n global rank\n rank = 9\nf()"]
)
def test_a_cell_that_assigns_rank_says_so(notebook: Notebook, cell: str) -> None:
    """When it has ended, also if it failed then; later cells that use it repeat it; ``del`` in one helps."""
    meant = f"not the rank's number, which is dist.get_rank(): `del rank` in a cell for ranks {BACK}"
    assert notebook.say(cell) == [f"rank is what this cell assigned, for later cells too, {meant}"]
    assert notebook.say("rank + 1") == [f"rank is what an earlier cell assigned, {meant}"]
    assert notebook.say("del rank") == []
    assert notebook.values("rank") == [0, 1, 2]
    assert notebook.say("rank") == []


def test_ordinary_cells_say_nothing(notebook: Notebook) -> None:
    """Using predefined names as they are, or as local names, is no reason for a line."""
    notebook.names["x"] = np.arange(4.0)
    assert notebook.say("[rank for rank in range(3)], rank, world_size, all_reduce(x.sum(), 'sum')") == []
    assert notebook.say("def f(rank): return rank\nf(3)") == []


def lost(name: str, ranks: str) -> str:
    """Return the line about what ranks changed in a copy."""
    return (
        f"{ranks} changed {name}, and the notebook's {name} is as it was: -o {name} on a cell that ends with "
        f"`{name}` brings the ranks' there"
    )


@pytest.mark.parametrize(
    ("make", "change"),
    [
        ("x = []", "for i in range(3): x.append(rank * 10 + i)"),
        ("x = {'a': [1]}", "x['a'][0] = 5"),
        ("import types\nx = types.SimpleNamespace(a=1)", "x.a = 2"),
        ("x = [1]", "x += [2]"),
        ("x = 5", "x += 1"),
        ("x = [1]", "def f(): x.append(2)\nf()"),
    ],
)
def test_what_ranks_change_in_a_copy_is_said_once(notebook: Notebook, make: str, change: str) -> None:
    """By the cell that changed it, with the ranks that did; again after the notebook's has come anew."""
    notebook.type(make)
    assert notebook.say("x") == []
    assert notebook.say(change) == [lost("x", "ranks 0-2")]
    assert notebook.say(change) == []
    notebook.type("x = 0")
    notebook.say("x")
    notebook.type(make)
    notebook.say("x")
    assert notebook.say("if rank == 1:\n    " + change.replace("\n", "\n    ")) == [lost("x", "rank 1")]


@pytest.mark.slow
def test_a_list_too_large_to_compare_is_seen_to_grow(notebook: Notebook) -> None:
    """Its length is looked at, here and when the notebook's comes anew."""
    notebook.type("x = list(range(1_000_000))")
    assert [note.split()[0] for note in notebook.say("x")] == ["copied"]
    assert notebook.say("x.index(0)") == []
    assert notebook.say("x.append(1)") == [lost("x", "ranks 0-2")]
    notebook.type("x = []")
    assert "what ranks 0-2 changed in it is lost" in notebook.say("x")[0]


def test_what_was_only_read_or_assigned_is_no_loss(notebook: Notebook) -> None:
    """Methods that change nothing, a new value under the name, and shared arrays."""
    notebook.type("x = [1, 2]; d = {'a': 1}; import numpy as np; a = np.zeros(3); word = 'w'")
    assert notebook.say("x.index(2), d.get('a'), d.items(), a.sum(), word.upper()") == []
    assert notebook.say("x = [3]\nx.append(1)") == []


def test_what_changed_on_several_ranks_names_them_when_it_is_replaced(notebook: Notebook) -> None:
    """One line for all ranks that changed it."""
    notebook.type("x = []")
    notebook.say("x.append(1)")
    notebook.type("x = [0]")
    assert notebook.say("x") == [
        "x was replaced: the notebook has changed it, and what ranks 0-2 changed in it is lost"
    ]


def test_a_module_that_ranks_imported_is_no_surprise(notebook: Notebook) -> None:
    """The import stands in the cell; the notebook's own name is for other ranks and cells."""
    notebook.type("import fractions\nimport string as letters")
    assert notebook.say("import fractions, string as letters") == []
    assert notebook.say("fractions.Fraction(1), letters.digits") == []


def test_a_name_that_ranks_took_over_is_said_once_and_comes_back(notebook: Notebook) -> None:
    """By the first later cell that reads it; ``del`` in a cell brings the notebook's back."""
    notebook.type("import numpy as np; x = np.zeros(3); k = 1")
    assert notebook.say("x = x.copy()") == []
    said = (
        "x is what an earlier cell assigned on ranks 0-2, not the notebook's: `del x` in a cell for ranks "
        "brings the notebook's back"
    )
    notebook.type("x[0] = 99")
    assert notebook.say("x[0], k") == [said]
    assert notebook.say("x[0]") == []
    assert notebook.say("del x") == []
    assert notebook.values("float(x[0])") == [99.0] * 3
    assert notebook.say("x") == []


def test_who_knows_what_changed_and_what_is_hidden(notebook: Notebook) -> None:
    """Content is compared where a look is cheap."""
    notebook.type("import numpy as np; d = {'a': 1}; e = [1]; x = np.zeros(3); rank = 1")
    notebook.say("d['a'] = 2; e; x = x.copy(); rank")
    names = {record.name: record for record in notebook.session.who(notebook.names).names}
    assert [info.as_delivered for info in names["d"].ranks.values()] == [False] * 3
    assert [info.as_delivered for info in names["e"].ranks.values()] == [True] * 3
    assert (names["x"].hides, names["rank"].hides) == ("the notebook's", "the predefined")
    assert list(names["rank"].ranks) == [0, 2]


def test_a_word_that_ranks_assigned_is_no_note(notebook: Notebook) -> None:
    """A word in a string may not be meant: that ranks have a value of their own under it is not said."""
    notebook.type("data = 2")
    notebook.say("data = 1")
    assert notebook.say("eval('1'), 'data done'") == []
    assert notebook.values("data") == [1, 1, 1]
