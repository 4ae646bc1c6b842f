"""From ranks' failures to the one error of a cell."""

from __future__ import annotations

import pickle
from typing import Any

from nbparallel.errors import ParallelError, PeerFailedError, RemoteError
from nbparallel.session.tasks import parallel_error
from nbparallel.transfer.pickle_format import BY_VALUE
from nbparallel.transfer.pickling import dump_error, dumps
from nbparallel.wire.messages import Cause, FrameLine, RankFailure

CELL = FrameLine("In[7]", 4, "<module>", "1 / 0")
IN_FUNCTION = FrameLine("In[3]", 2, "f", "return 1 / x")


def failure(rank: int, error: BaseException | None = None, **options: Any) -> RankFailure:
    """Return a failure as the engine makes it."""
    error = error or ZeroDivisionError("division by zero")
    options = {"time_ns": 100 + rank, "frames": (CELL,), "exception": dump_error(error)} | options
    return RankFailure(rank=rank, ename=type(error).__name__, evalue=str(error), **options)


def peer(rank: int, failed: int, **options: Any) -> RankFailure:
    """Return the failure of a rank that waited for another one."""
    error = PeerFailedError(f"rank {failed} failed with ZeroDivisionError", rank=failed)
    return failure(
        rank, error, cause=Cause.PEER, frames=(FrameLine("In[7]", 6, "<module>", "barrier()"),), **options
    )


def test_message_names_the_root_cause_first() -> None:
    """Who failed, with what, on which line, and who was freed: in the message, root cause first."""
    errors = {rank: peer(rank, 2, time_ns=1) for rank in (0, 1, 3)} | {2: failure(2)}
    error = parallel_error.build_parallel_error(errors, {})
    assert str(error) == "ZeroDivisionError on rank 2, line 4: division by zero (ranks 0-1, 3 were released)"
    assert list(error.errors) == [2, 0, 1, 3]
    assert isinstance(error.errors[2], ZeroDivisionError)
    assert error.errors[0].rank == 2  # type: ignore[attr-defined]


def test_freed_ranks_are_named_but_did_not_raise() -> None:
    """A rank that computed and was stopped is in the message and not in `errors`."""
    error = parallel_error.build_parallel_error({2: failure(2)}, {0: ", line 5", 1: ", line 5"})
    assert str(error).endswith("(ranks 0-1 were released)")
    assert list(error.errors) == [2]
    freed = "[ranks 0-1], line 5: released by an interrupt after another rank had failed"
    assert freed in error._render_traceback_()


def test_equal_failures_are_one() -> None:
    """The same exception on all ranks is one message and one traceback; `errors` still has every rank."""
    error = parallel_error.build_parallel_error({rank: failure(rank) for rank in range(4)}, {})
    assert str(error) == "ZeroDivisionError on ranks 0-3, line 4: division by zero"
    shown = "\n".join(error._render_traceback_())
    assert shown.count("1 / 0") == 1
    assert "[ranks 0-3]" in shown
    assert list(error.errors) == [0, 1, 2, 3]


def test_line_is_the_cells_own() -> None:
    """The line is that of the cell that ran, also when a function of another cell raised."""
    error = parallel_error.build_parallel_error({0: failure(0, frames=(CELL, IN_FUNCTION))}, {})
    assert "rank 0, line 4:" in str(error)
    shown = "\n".join(error._render_traceback_())
    assert "Cell In[3], line 2, in f\n    return 1 / x" in shown


def test_the_earliest_independent_failure_is_the_root() -> None:
    """Of several ranks that failed by themselves the first one in time is the root."""
    error = parallel_error.build_parallel_error(
        {0: failure(0, KeyError("k"), time_ns=9), 1: failure(1, time_ns=5)}, {}
    )
    assert str(error) == "ZeroDivisionError on rank 1, line 4: division by zero (also KeyError on rank 0)"
    assert list(error.errors) == [1, 0]


def test_what_cannot_be_rebuilt_is_a_remote_error() -> None:
    """An exception that cannot travel, or that lies in its pickle, is a RemoteError with name and text."""
    for data in (None, b"no pickle", dumps("no exception", BY_VALUE).data, dump_error(KeyboardInterrupt())):
        error = parallel_error.build_parallel_error({1: failure(1, exception=data)}, {}).errors[1]
        assert isinstance(error, RemoteError)
        assert (error.ename, error.evalue) == ("ZeroDivisionError", "division by zero")
        assert "line 4" in str(error.__cause__)


def test_except_star_and_pickle() -> None:
    """`except*` takes the part it names, with ranks and result; the group survives pickling."""
    error = parallel_error.build_parallel_error(
        {0: failure(0), 1: failure(1, KeyError("k"))}, {}, result="what there was"
    )
    parts: list[Any] = []
    rest: list[Any] = []
    try:
        try:
            raise error
        except* ZeroDivisionError as part:
            parts.append(part)
    except ParallelError as left:
        rest.append(left)
    assert [(list(part.errors), part.result) for part in parts] == [([0], "what there was")]
    assert list(rest[0].errors) == [1]
    again = pickle.loads(pickle.dumps(error))
    assert list(again.errors) == [0, 1]
    assert str(again) == str(error)


def test_a_long_text_is_cut_in_the_message_only() -> None:
    """A text of many lines does not flood the message; the traceback has all of it."""
    error = parallel_error.build_parallel_error({0: failure(0, ValueError("first\n" + "x" * 2000))}, {})
    assert str(error) == "ValueError on rank 0, line 4: first …"
    assert "x" * 2000 in "\n".join(error._render_traceback_())


def test_one_failure_on_several_lines_is_one() -> None:
    """A deadlock that each rank met on its own line is one failure; the lowest rank's comes first."""
    from nbparallel.errors import DeadlockError

    places = {rank: FrameLine("In[7]", 3 + rank % 2, "<module>", "recv()") for rank in range(3)}
    errors = {r: failure(r, DeadlockError("d"), time_ns=9 - r, frames=(places[r],)) for r in range(3)}
    error = parallel_error.build_parallel_error(errors, {})
    assert str(error) == "DeadlockError on ranks 0-2, lines 3, 4: d"
    assert list(error.errors) == [0, 1, 2]


def test_the_last_line_does_not_repeat_the_text() -> None:
    """In the notebook the root's text is there once, and below it who it was and who was freed."""
    error = parallel_error.build_parallel_error({0: failure(0), 1: peer(1, 0)}, {})
    assert (
        error._render_traceback_()[-1]
        == "ParallelError: ZeroDivisionError on rank 0, line 4 (rank 1 was released)"
    )


def test_a_long_text_of_several_places_is_shown_once() -> None:
    """The ranks of the second place get a reference to the first."""
    text = "what each rank called:\n" + "  0 all_reduce\n" * 10
    errors = {
        rank: failure(rank, ValueError(text), frames=(FrameLine("In[2]", line, "<module>", ""),))
        for rank, line in enumerate((3, 5))
    }
    shown = "\n".join(parallel_error.build_parallel_error(errors, {})._render_traceback_())
    assert shown.count(text) == 1
    assert "line 5" in shown
    assert "ValueError: the same as above" in shown


def test_causes_of_each_rank_are_shown() -> None:
    """An error that came of another one: what each rank's cause said, and each way by itself."""

    def caused(rank: int, kind: str, text: str, line: int) -> RankFailure:
        head = f"{kind}        Traceback (most recent call last)"
        parts = (head, f"Cell In[7], line {line}\n----> {line} open(path)\n", f"{kind}: {text}", "\nabove\n")
        return failure(rank, RuntimeError("no data"), traceback=(*parts, "RuntimeError: no data"))

    failures = {rank: caused(rank, "OSError", f"no part{rank // 2}", 2) for rank in range(4)}
    shown = "\n".join(parallel_error.build_parallel_error(failures, {}).rendering)
    assert shown.count("----> 2 open(path)") == shown.count("RuntimeError: no data") == 1
    assert "ranks 0-1: OSError: no part0\nranks 2-3: OSError: no part1\n" in shown
    failures |= {2: caused(2, "OSError", "no part1", 3), 3: caused(3, "KeyError", "no part1", 2)}
    shown = "\n".join(parallel_error.build_parallel_error(failures, {}).rendering)
    for ranks, text in (("ranks 0-1", "OSError: no part0"), ("rank 2", "OSError: no part1")):
        assert text in shown.partition(f"[{ranks}]\n")[2].partition("\n[")[0]
    assert "KeyError: no part1" in shown.partition("[rank 3]\n")[2]
