"""`RankValues`: what `-o` and `pull` give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from IPython.lib.pretty import pretty

from nbparallel.errors import UnpicklableError
from nbparallel.session import RankValues, Session


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        ([np.arange(2), np.arange(3)], np.array([0, 1, 0, 1, 2])),
        ([np.zeros((1, 2)), np.ones((2, 2))], np.array([[0, 0], [1, 1], [1, 1]])),
        ([1, 2.5, np.float32(4)], np.array([1, 2.5, 4])),
        ([np.array(3), 4], np.array([3, 4])),
        ([True, False], np.array([True, False])),
        ([["a"], [], ["b", "c"]], ["a", "b", "c"]),
    ],
)
def test_gather_makes_one_of_the_parts(parts: list[Any], whole: Any) -> None:
    """In rank order, whatever order they came in; arrays stay arrays, lists lists."""
    values = RankValues(dict(reversed(list(enumerate(parts)))))
    gathered = values.gather()
    assert type(gathered) is type(whole)
    np.testing.assert_array_equal(gathered, whole)


def test_what_was_gathered_is_new() -> None:
    """Of one rank too: who writes to it does not write to the part."""
    part = np.zeros(3)
    RankValues({0: part}).gather()[:] = 1
    assert part.sum() == 0
    items = [1]
    RankValues({0: items}).gather().append(2)
    assert items == [1]


def test_parts_are_a_sequence() -> None:
    """Slices and sums are lists, and ``match`` takes the parts apart; a slice is one of ranks."""
    parts, some = RankValues({0: 10, 1: 11, 2: 12}), RankValues({0: 10, 2: 12})
    assert (parts[1:], parts[::-1], some[1:], some[:2]) == ([11, 12], [12, 11, 10], [12], [10])
    one = [1]
    assert (parts + one, one + parts, some + some) == ([10, 11, 12, 1], [1, 10, 11, 12], [10, 12, 10, 12])
    with pytest.raises(TypeError):
        parts + 1
    match parts:
        case [first, *rest]:
            assert (first, rest) == (10, [11, 12])
        case _:
            pytest.fail("no sequence")


FRAME = type("DataFrame", (), {"__module__": "pandas"})()
"""Stands for one of pandas, whose import takes longer than these tests."""


@pytest.mark.parametrize(
    ("parts", "kind", "words"),
    [
        ({}, ValueError, "no rank has a value"),
        ({0: np.zeros((2, 2)), 3: np.zeros((2, 3))}, ValueError, r"rank 0: \(2, 2\), rank 3: \(2, 3\)"),
        ({0: np.zeros(2), 1: 3}, TypeError, "rank 0: ndarray, rank 1: int"),
        ({0: "text", 1: "more"}, TypeError, "rank 0: str"),
        ({0: [1], 1: None}, TypeError, "rank 1: NoneType"),
        ({0: FRAME, 1: FRAME}, TypeError, r"rank 1: DataFrame; `pandas.concat\(list\(…\)\)` joins them"),
    ],
)
def test_what_does_not_fit_is_named_with_its_rank(parts: Any, kind: type[Exception], words: str) -> None:
    """No silent array of objects."""
    with pytest.raises(kind, match=words):
        RankValues(parts).gather()


class Tall:
    """A value whose text takes two lines, without a dtype, as a data frame's."""

    shape = (2, 1)

    def __repr__(self) -> str:
        return "a\nb"


def test_long_values_are_shown_by_class_and_shape() -> None:
    """One line for each rank; short values are a list, as they print."""
    assert pretty(RankValues({0: 1, 1: "x"})) == "[1, 'x']"
    assert pretty(RankValues({0: np.arange(3)})) == "[array([0, 1, 2])]"
    parts = RankValues({0: np.zeros((300, 2)), 2: Tall(), 3: None})
    assert pretty(parts) == "rank 0: ndarray (300, 2) float64\nrank 2: Tall (2, 1)\nrank 3: None"
    assert repr(parts) == repr(list(parts))


@pytest.mark.slow
def test_a_call_and_a_pull_give_all_values_or_raise(capsys: pytest.CaptureFixture[str]) -> None:
    """An error names ranks and reason, once, and has what came from the others."""
    odd = "class Odd:\n    def __reduce__(self): return int, ('x',)"
    with Session(3) as session:
        session.run(f"{odd}\nmade = (i for i in ()) if rank else [7]\nodd = [Odd(), 8, 9][rank]")
        with pytest.raises(UnpicklableError, match=r"made stayed on ranks 1-2: .*'generator'") as caught:
            session.pull("made")
        assert caught.value.result.values[0] == [7]
        with pytest.raises(UnpicklableError, match="odd stayed on rank 0: it cannot be rebuilt"):
            session.pull("odd")
        with pytest.raises(UnpicklableError, match=r"a result stayed on ranks 0-2: .*'generator'"):
            session.call(eval, "(i for i in ())")
        assert session.call(eval, "6 * 7") == [42] * 3
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_value_that_cannot_travel_says_where_it_is() -> None:
    """Its repr names the rank, and a line below the cell the ranks and the reason."""
    with Session(3) as session:
        result = session.run("made = (i for i in range(3)) if rank else [7]\nmade")
        (note,) = result.notes
        assert note.startswith("the values of ranks 1-2 stayed there, and text stands for each: ")
        assert "cannot pickle 'generator' object" in note
        assert result.values[0] == [7]
        for rank in (1, 2):
            assert repr(result.values[rank]).startswith(f"on rank {rank}: <generator object <genexpr> at 0x")
        assert session.run("made", want_values=False, ranks=[1]).notes == ()
        source = (
            "class Odd:\n    def __reduce__(self): return int, ('x',)\n    def __repr__(self): return 'odd'"
        )
        odd = session.run(f"{source}\nOdd()", ranks=[2])
        assert repr(odd.values[2]) == "on rank 2: odd"
        (note,) = odd.notes
        assert note.startswith(
            "the value of rank 2 stayed there, and text stands for it: it cannot be rebuilt"
        )
