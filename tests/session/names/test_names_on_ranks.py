"""The same rules through real ranks: memory, rights and classes across processes."""

import numpy as np
import pytest

from nbparallel.errors import ParallelError, ReadOnlyArrayError
from nbparallel.session import Session

NOTEBOOK = """
import numpy as np
x = np.arange(1000.); alias = x; v = x[::-2]
big = {"m": np.ones(100_000)}
class Model:
    def __init__(self): self.w = x
    def where(self): return rank * 100 + offset
offset = 5
model = Model()
"""


@pytest.fixture
def notebook():
    """Return the namespace of a notebook that ran `NOTEBOOK`; it is emptied afterwards."""
    namespace = {"__name__": "__main__"}
    exec(NOTEBOOK, namespace)
    yield namespace
    namespace.clear()


def test_names_on_real_ranks(notebook):
    """Arrays are the same memory, large buffers each rank's own, classes one class on both sides."""
    with Session(2) as session:

        def run(cell, **keywords):
            return list(session.run(cell, namespace=notebook, **keywords).values)

        assert run("x is alias and np.shares_memory(x, v) and float(v[0])") == [999.0, 999.0]
        notebook["x"][999] = -1
        assert run("float(v[0])") == [-1.0, -1.0]
        assert run("big['m'][:] = rank; float(big['m'].sum())") == [0.0, 100_000.0]
        assert notebook["big"]["m"].sum() == 100_000
        assert run("model.where(), type(model) is Model") == [(5, True), (105, True)]
        notebook["offset"] = 6
        assert run("model.where()") == [6, 106]
        pulled = session.pull("model")
        assert all(type(model) is notebook["Model"] for model in pulled)
        assert notebook["Model"].where.__globals__ is notebook
        with pytest.raises(ParallelError) as caught:
            run("v[0] = 1")
        assert all(isinstance(error, ReadOnlyArrayError) for error in caught.value.errors.values())
        assert "nbp.share(v)" in str(caught.value)
        run("x[rank] = 7", share=["x"])
        assert notebook["x"][:3].tolist() == [7, 7, 2]
        session.restart(1)
        assert run("float(x[0]), model.where()") == [(7.0, 6), (7.0, 106)]
        del notebook["alias"]
        assert run("'alias' in globals()") == [False, False]
        run("mine = np.zeros(10); copy = x.copy()")
        assert isinstance(session.pull("copy")[0], np.ndarray)


@pytest.mark.slow
def test_two_names_are_one_array_whatever_its_elements(notebook):
    """Also of fields, whose dtype is told as a list; what died is not remembered for ever."""
    pairs = np.zeros(3, [("a", "i4"), ("b", "f8")])
    notebook.update(p=pairs, q=pairs)
    count = "import gc\nlen(next(o for o in gc.get_objects() if type(o).__name__ == 'RankNames').attached)"
    with Session(1) as session:
        run = lambda cell: session.run(cell, namespace=notebook).values[0]  # noqa: E731
        assert run("p is q and p.dtype.names") == ("a", "b")
        for turn in range(3):
            for i in range(60):
                notebook[f"v{i}"] = notebook["x"][60 * turn + i :]
            run("; ".join(f"v{i}" for i in range(60)))
        assert run(count) <= 2 * 64
