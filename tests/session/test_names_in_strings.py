"""Names of the notebook that a cell has in a string only: they travel where the cell looks names up so."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from nbparallel.errors import ParallelError
from nbparallel.session import Session

USE = "def use(name): return globals()[name]"


@pytest.mark.parametrize(
    "cell",
    [
        "globals()['s']",
        "globals().get('s')",
        "'s' in globals() and 7",
        "vars()['s']",
        "locals()['s']",
        "int('{s}'.format_map(globals()))",
        "[globals()[name] for name in ('s', )][0]",
        "import __main__\n__main__.s",
        "from __main__ import s as own\nown",
        "import timeit\ntimeit.timeit('s + 1', globals=globals(), number=1) and 7",
        "import timeit\ntimeit.timeit('s + 1', 'from __main__ import s', number=1) and 7",
        "import pandas as pd\nint(pd.eval('s + 1')) - 1",
        "def local():\n    import pandas as pd\n    return int(pd.eval('s + 1')) - 1\nlocal()",
        "import cProfile, contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()):\n"
        "    cProfile.run('t = s')\nt",
        "get_ipython().user_ns['s']",
        "use('s')",
    ],
)
def test_they_travel(two_ranks: Session, cell: str) -> None:
    """A word in a string of such a cell, or of a function, is known."""
    notebook = {"s": 7}
    exec(USE, notebook)
    notebook["use"].__module__ = "__main__"
    assert two_ranks.run(cell, namespace=notebook).values == [7, 7]


def test_a_name_of_a_file_is_asked_for(two_ranks: Session, tmp_path: Path) -> None:
    """A name that only a file uses is not sent: the error says so, and naming it in the cell sends it."""
    path = tmp_path / "uses.py"
    path.write_text("made = s + 0\n")
    cell = f"exec(open({str(path)!r}).read())\nmade"
    with pytest.raises(ParallelError, match=r"name 's' is not defined; if the notebook has it, name it"):
        two_ranks.run(cell, namespace={"s": 7})
    assert two_ranks.run(f"s\n{cell}", namespace={"s": 7}).values == [7, 7]
    with pytest.raises(ParallelError, match=r"name 'zzz' is not defined$"):
        two_ranks.run("zzz", namespace={"s": 7})


def test_other_strings_send_nothing(two_ranks: Session) -> None:
    """Words that a cell prints send nothing."""
    result = two_ranks.run("('data', s, 'data' in dir())", namespace={"data": [1], "s": 7})
    assert result.values == [("data", 7, False)] * 2


def test_a_word_that_cannot_travel_hinders_no_cell(two_ranks: Session) -> None:
    """A word is no name for sure: what cannot be sent is not, without a line."""
    result = two_ranks.run("eval('1 + 1'), 'lock'", namespace={"lock": threading.Lock()})
    assert result.values == [(2, "lock")] * 2
    assert result.notes == ()


class Model:
    """Has methods of names that evaluate strings elsewhere."""

    def eval(self) -> int:
        """Do as torch's models."""
        return 1

    evaluate = timeit = eval


@pytest.mark.parametrize(
    "use",
    [
        "model.eval()",
        "model.evaluate()",
        "model.timeit()",
        "evaluate(model)",
        "sql[:1]",
        "%time 1",
        "use(model)",
    ],
)
def test_methods_of_objects_look_nothing_up(two_ranks: Session, use: str) -> None:
    """A model has an ``eval`` of its own: words of the cell send nothing, and move no array."""
    data = np.zeros(9)
    notebook = {"data": data, "model": Model(), "sql": "select"}
    exec("def use(model): return model.eval(), 'data done'\nevaluate = use", notebook)
    notebook["use"].__module__ = "__main__"
    result = two_ranks.run(f"{use}\n('data done', 'data' in dir())", namespace=notebook)
    assert result.values == [("data done", False)] * 2
    assert notebook["data"] is data
