"""A data frame of pandas that is sent: its columns are arrays, and travel as arrays do."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.multiprocessing.programs import run_program

pytestmark = [pytest.mark.slow, pytest.mark.matrix(cover=(), size=1)]

FRAMES = """
import pandas as pd
from pandas.testing import assert_frame_equal, assert_series_equal

ROWS = 50_000  # of eight bytes: more than 256 KiB a column
frame = pd.DataFrame(
    {"x": np.arange(ROWS, dtype=float), "n": np.arange(ROWS), "word": ["a", "b"] * (ROWS // 2)},
    index=pd.date_range("2026-01-01", periods=ROWS, freq="s"),
)
frame["kind"] = frame["word"].astype("category")
"""


def test_a_frame_arrives_as_it_was(tmp_path: Path, method: str) -> None:
    """Types, index and categories too; a column arrives in shared memory, and is the receiver's."""
    run_program(
        FRAMES
        + textwrap.dedent("""
        def child(inbox, outbox):
            received = inbox.get()
            shared = nbp.is_shared(received["x"].to_numpy())
            received.loc[received.index[0], "x"] = -1.0
            received["new"] = received["n"] * 2
            outbox.put((shared, received))

        inbox, outbox = ctx.Queue(), ctx.Queue()
        process = ctx.Process(target=child, args=(inbox, outbox), daemon=True)
        process.start()
        inbox.put(frame)
        shared, answer = outbox.get(timeout=30)
        process.join()
        assert process.exitcode == 0
        assert shared, "a column of 400 KB is copied once, into shared memory"
        assert frame["x"].iloc[0] == 0 and "new" not in frame, "the sender's is its own"
        expected = frame.assign(new=frame["n"] * 2)
        expected.loc[expected.index[0], "x"] = -1.0
        assert_frame_equal(answer, expected)
        answer.loc[:, "x"] = 7.0  # the answer can be written too
        assert (answer["x"] == 7).all() and expected["x"].iloc[1] == 1
        """),
        tmp_path,
        method,
    )


def test_a_frame_of_a_shared_array(tmp_path: Path, method: str) -> None:
    """What a process writes through the frame's memory is seen by all: the frame has no copy of it."""
    run_program(
        FRAMES
        + textwrap.dedent("""
        def child(received, outbox):
            memory = received["x"].to_numpy()
            memory.flags.writeable = True  # pandas gives a column read-only
            memory[:] = 3.0
            outbox.put(nbp.is_shared(memory))

        mine = nbp.zeros(ROWS)
        view = pd.DataFrame(mine, columns=["x"], copy=False)
        outbox = ctx.Queue()
        process = ctx.Process(target=child, args=(view, outbox), daemon=True)
        process.start()
        assert outbox.get(timeout=30)
        process.join()
        assert process.exitcode == 0
        assert (mine == 3).all() and (view["x"] == 3).all()
        """),
        tmp_path,
        method,
    )


def test_groups_in_a_pool_and_in_joblib(tmp_path: Path, method: str) -> None:
    """The same sums as in one process, group by group, in order."""
    run_program(
        FRAMES
        + textwrap.dedent("""
        import joblib

        def total(group):
            name, part = group
            return name, part[["x", "n"]].sum()

        expected = [total(group) for group in frame.groupby("word")]
        with ctx.Pool(2) as pool:
            found = pool.map(total, frame.groupby("word"))
        mp.register_joblib()
        with joblib.parallel_config(backend="nbparallel"):
            again = joblib.Parallel(n_jobs=2)(joblib.delayed(total)(group) for group in frame.groupby("word"))
        for results in (found, again):
            for (mine, sums), (theirs, right) in zip(results, expected, strict=True):
                assert mine == theirs
                assert_series_equal(sums, right)
        """),
        tmp_path,
        method,
    )
