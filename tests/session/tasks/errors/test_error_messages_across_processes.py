"""What ranks show may hold objects of classes that only they have: the notebook never has to know these."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from nbparallel.engine.output import pickle_message
from nbparallel.errors import ParallelError
from nbparallel.session import Session
from nbparallel.wire.messages import Display

_SHOWS = """
from IPython.display import display
class Word(str):
    def __str__(self): return "another word"
class Shown:
    def _repr_html_(self): return Word("<b>html</b>")
    def __repr__(self): return Word("text")
class Told(Exception):
    def __str__(self): return Word("told")
display({"application/json": {"word": Word("raw")}, "text/plain": Word("plain")}, raw=True)
Shown()
"""


@pytest.mark.slow
def test_text_of_a_class_that_only_ranks_have() -> None:
    """Displays, values and errors may be made of it; no rank is ended for that."""
    with Session(2) as session:
        result = session.run(_SHOWS)
        shown = result.ranks[1].displays
        assert shown[0] == {"application/json": {"word": "raw"}, "text/plain": "plain"}
        assert shown[1]["text/html"] == "<b>html</b>"
        assert type(shown[1]["text/html"]) is str
        with pytest.raises(ParallelError, match="Told on rank") as raised:
            session.run("raise Told()", ranks=[1])
        assert list(raised.value.errors) == [1]
        with pytest.raises(ParallelError, match="an object of class Shown cannot be shown") as raised:
            session.run("display({'application/x-own': Shown()}, raw=True)")
        assert [type(error) for error in raised.value.errors.values()] == [TypeError] * 2
        assert session.run("'alive'").values == ["alive"] * 2


def test_what_a_notebook_shows_arrives_as_it_is() -> None:
    """Plain kinds are not touched, and numpy's numbers become Python's."""
    plain = {"a": [1, 2.5, None, True, b"png", ("x", {"deep": "y"})]}
    derived = {"n": np.int64(3), "f": np.float32(0.5), "b": np.bool_(True), "o": OrderedDict(k=[1])}
    found = pickle.loads(pickle_message(Display(1, "display", plain, derived, {})))
    assert found == Display(1, "display", plain, {"n": 3, "f": 0.5, "b": True, "o": {"k": [1]}}, {})
    assert [type(value) for value in found.metadata.values()] == [int, float, bool, dict]
    for refused in (Path("/"), np.zeros(2), Path, test_text_of_a_class_that_only_ranks_have):
        with pytest.raises(TypeError, match="cannot be shown in the notebook"):
            pickle_message(Display(1, "display", {"x": refused}, {}, {}))
