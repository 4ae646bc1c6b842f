"""Sessions called as their pages describe it: names, kinds of arguments, and what returns."""

from __future__ import annotations

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel import errors
from nbparallel.errors import UnknownNameError
from nbparallel.session import Session


def test_errors_are_where_a_notebook_looks_for_them() -> None:
    """`except nbp.ParallelError` works for every error; what is none stays unknown."""
    names = [name for name in vars(errors) if name.endswith("Error")]
    assert len(names) > 25
    assert all(getattr(nbp, name) is getattr(errors, name) for name in names)
    with pytest.raises(AttributeError, match="no attribute 'ParalelError'"):
        nbp.ParalelError  # noqa: B018


@pytest.mark.slow
def test_share_in_one_string_or_several(two_ranks: Session) -> None:
    """As behind the magic's flag, or one by one; without a namespace nothing can be shared."""
    names = {"a": np.zeros(2), "b": np.zeros(2)}
    two_ranks.run("a[rank] = b[rank] = 1", namespace=names, share="a, b")
    assert (names["a"].tolist(), names["b"].tolist()) == ([1, 1], [1, 1])
    two_ranks.run("a[rank] = 2", namespace=names, share=iter(["a"]))
    assert names["a"].tolist() == [2, 2]
    with pytest.raises(UnknownNameError, match="none was passed: add namespace="):
        two_ranks.run("1", share=["a"])
    with pytest.raises(TypeError, match="call needs a function, not str"):
        two_ranks.call("rank")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_result_is_looked_up_by_rank(three_ranks: Session) -> None:
    """`result[rank]` and iteration give everything about a rank; one that took no part is a KeyError."""
    result = three_ranks.run("print('hello', rank); rank * 10", ranks=[0, 2])
    assert (result[2].value, result[2].stdout, len(result)) == (20, "hello 2\n", 2)
    assert [one.rank for one in result] == [0, 2]
    with pytest.raises(KeyError):
        result[1]


@pytest.mark.slow
def test_spawn_takes_what_torchs_takes() -> None:
    """Join and daemon by place or name; what cannot be had, or is no tuple, is said."""
    marks = nbp.zeros(2)

    def mark(rank: int) -> None:
        marks[rank] = 1

    nbp.spawn(mark, (), 2, True, False)
    assert marks.tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"join=False is not possible: use nbparallel\.Session"):
        nbp.spawn(mark, nprocs=2, join=False)
    for args in (3, "ab"):
        with pytest.raises(TypeError, match=r"arguments as a tuple, args=\(.*,\)"):
            nbp.spawn(mark, args)  # type: ignore[arg-type]


def test_wrong_options_are_refused_before_anything_starts(two_ranks: Session) -> None:
    """Time-outs, seeds, names and ranks of a wrong kind raise on the caller; ranks may be any collection."""
    wrong: list[tuple[type[Exception], dict[str, object]]] = [
        (TypeError, {"timeout": "1"}),
        (TypeError, {"timeout": True}),
        (ValueError, {"timeout": -1}),
        (ValueError, {"timeout": float("nan")}),
        (TypeError, {"seed": 1.5}),
        (ValueError, {"seed": -1}),
        (TypeError, {"share": [3], "namespace": {}}),
    ]
    for kind, options in wrong:
        with pytest.raises(kind, match=next(iter(options))):
            two_ranks.run("print('it ran')", **options)  # type: ignore[arg-type]
    for ranks in ([1], (1,), {1}, range(1, 2), np.array([1]), iter([1])):
        assert list(two_ranks.run("rank", ranks=ranks, timeout=np.float64(60)).values) == [1]  # type: ignore[arg-type]
    for ranks in (1, "1", [1.0], [True], ["1"]):
        with pytest.raises(TypeError, match="as \\[0, 2\\]"):
            two_ranks.run("rank", ranks=ranks)  # type: ignore[arg-type]
    assert two_ranks.run("rank", timeout=float("inf")).values == [0, 1]


def test_strategies_are_a_set_of_names() -> None:
    """As torch's: compared with a set, and looked through in a loop."""
    names = nbp.get_all_sharing_strategies()
    assert names == {"file_descriptor", "file_system", "file_region", "mmap", "copy"}
    assert names >= {"mmap"}
    assert names - {"mmap", "copy"} == {"file_descriptor", "file_system", "file_region"}
    assert list(names) == [*names.names]
