"""Checked cells on real ranks: each race is named, with array and lines, and right programs have none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nbparallel.errors import CellTimeoutError, ParallelError
from nbparallel.session import Session
from nbparallel.testing import processes
from tests.distributed.races.programs import CELLS, WITHOUT_RACE, RacyCell

pytest_plugins = ["tests.harness.sessions"]
NAP = "import random, time\ndef nap():\n    time.sleep(random.random() / 500)"


def notebook() -> dict[str, Any]:
    """Return a notebook's names."""
    return {"counter": np.zeros(2), "grid": np.zeros(12), "square": np.zeros((3, 3)), "np": np}


SHARED = ["counter", "grid", "square"]


def checked(session: Session, source: str, names: dict[str, Any] | None = None) -> Any:
    """Run a checked cell; return its report."""
    session.run(NAP)
    result = session.run(source, namespace=names or notebook(), share=SHARED, check_races=True)
    return result.race_report


@pytest.mark.matrix(cover=(), size=5)
@pytest.mark.parametrize("name", CELLS)
def test_a_race_is_named(three_ranks: Session, name: str) -> None:
    """With array, lines and kinds."""
    cell: RacyCell = CELLS[name]
    report = checked(three_ranks, cell.source)
    found = {(race.lines, frozenset(race.kinds)) for race in report.races if race.certain}
    assert (cell.lines, cell.kinds) in {(tuple(sorted(lines)), kinds) for lines, kinds in found}, str(report)
    assert cell.array.partition("[")[0] in {race.array for race in report.races}
    assert cell.array in str(report)


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=5)
@pytest.mark.parametrize("name", CELLS)
def test_what_was_missing_mends_it(three_ranks: Session, name: str) -> None:
    """The same program with what orders it."""
    report = str(checked(three_ranks, CELLS[name].right))
    assert report.startswith("no race among ")
    assert "not checked" not in report


@pytest.mark.matrix(cover=(), size=5)
@pytest.mark.parametrize("name", WITHOUT_RACE)
def test_right_programs(three_ranks: Session, name: str) -> None:
    """Nothing is reported that is none."""
    report = str(checked(three_ranks, WITHOUT_RACE[name]))
    assert report.startswith("no race among ")
    assert "not checked" not in report


def test_names_are_plain_again(three_ranks: Session) -> None:
    """Afterwards nothing is traced, and delivered names are what was delivered."""
    names = notebook()
    result = three_ranks.run("mine = grid[2:4]\ngrid", namespace=names, share=SHARED, check_races=True)
    assert all(type(value) is np.ndarray for value in result.values)
    kinds = three_ranks.run("[type(x) for x in (grid, mine, nbp.zeros(1), np.asarray([1]))]", namespace=names)
    assert {kind for value in kinds.values for kind in value} == {np.ndarray}
    names["grid"] = np.ones(3)  # not the rank's own: a new value of the notebook's arrives without a note
    later = three_ranks.run("grid.sum()", namespace=names)
    assert list(later.values) == [3.0] * 3
    assert not [note for note in later.notes if "grid" in note]


def test_an_unchecked_cell_has_no_races(three_ranks: Session) -> None:
    """It would look as if nothing was found."""
    result = three_ranks.run("1")
    assert result.race_report is None
    with pytest.raises(AttributeError, match="check_races=True"):
        result.races  # noqa: B018


def test_some_ranks(three_ranks: Session) -> None:
    """A cell on some ranks is checked by itself: the ends of cells order everything."""
    names = notebook()
    for rank in range(3):
        result = three_ranks.run(
            "counter[0] += 1", ranks=[rank], namespace=names, share=SHARED, check_races=True
        )
        assert result.races == ()
    assert names["counter"][0] == 3
    pair = three_ranks.run("counter[0] += 1", ranks=[0, 2], namespace=names, share=SHARED, check_races=True)
    assert pair.races[0].ranks == ((0, 2), (0, 2))


def test_a_message_of_an_earlier_cell(three_ranks: Session) -> None:
    """It orders nothing in this one, and the next message of the same sender is not taken for it."""
    three_ranks.run("if rank == 0:\n    send(1, 1)", ranks=[0])
    report = checked(
        three_ranks,
        """
if rank == 0:
    grid[0] = 1
    send(2, 1)
elif rank == 1:
    assert (recv(src=0), recv(src=0)) == (1, 2)
    grid[0] = 2
""",
    )
    assert str(report).startswith("no race among ")


def test_functions_of_other_cells_and_files(three_ranks: Session) -> None:
    """Their lines are named with the cell."""
    three_ranks.run("def bump(x):\n    x[0] += 1", execution_count=2)
    report = checked(three_ranks, "\nbump(counter)")
    assert report.races[0].lines == (2, 2), str(report)
    assert report.races[0].cells == ("In[2]", "In[2]")


@pytest.mark.slow
def test_every_collective_runs_as_without(three_ranks: Session) -> None:
    """Operations take traced arrays, fill and return them, and give the results that they give without."""
    source = """
x = np.arange(3.0) + rank
grid[4 * rank:4 * rank + 3] = x
barrier()
mine = grid[4 * rank:4 * rank + 3]
same = all_reduce(mine)
assert same is mine
found = [mine.copy(), broadcast(mine if rank == 1 else None, 1), all_gather(mine)]
found += [all_gather(mine, view=True)[1]]
parts = [np.zeros(3) for _ in range(world_size)]
assert all_gather(parts, mine) is parts
found += [parts, gather(mine), scatter([mine] * 3 if rank == 0 else None), all_to_all([mine] * 3)]
out = np.zeros(1)
found += [reduce_scatter(out, [mine[:1]] * 3), dist.scan(mine.copy()), dist.maxloc(mine), reduce(mine.copy())]
work = all_reduce(mine, async_op=True)
assert work.result() is mine
dist.average_gradients({"a": mine})
dist.assert_same(mine.copy())
out9 = np.zeros(9)
dist.all_gather_into_tensor(out9, mine)
works = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, (rank + 1) % 3)])
found += [out9, recv(src=(rank + 2) % 3), {"list": mine.tolist(), "repr": repr(mine)}]
found
"""
    names = notebook()
    plain = three_ranks.run(source, namespace=names, share=SHARED).values
    names["grid"][:] = 0
    traced = three_ranks.run(source, namespace=names, share=SHARED, check_races=True)
    assert repr(list(plain)) == repr(list(traced.values))


@pytest.mark.slow
def test_a_dead_rank(three_ranks: Session) -> None:
    """What it did is not known, and the report says so; the next cell is checked again."""
    with pytest.raises(ParallelError) as raised:
        checked(
            three_ranks,
            "import os, signal\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\nbarrier()",
        )
    assert "not checked: what rank 1 did: its log was lost" in str(raised.value.result.race_report)
    assert str(checked(three_ranks, "grid[rank] = 1")).startswith("no race among 3 ")


@pytest.mark.slow
def test_an_interrupt(three_ranks: Session) -> None:
    """The report has what was done until then."""
    with pytest.raises(CellTimeoutError) as raised:
        three_ranks.run(
            "counter[0] += 1\nimport time\ntime.sleep(60)",
            namespace=notebook(), share=SHARED, check_races=True, timeout=1,
        )  # fmt: skip
    assert "counter[0]" in str(raised.value.result.race_report)
    assert str(checked(three_ranks, "grid[rank] = 1")).startswith("no race among 3 ")


REUSED = """
import gc, time
from nbparallel.distributed.races.traced_array import plain
places = set()
kept = nbp.zeros(50_000) if rank == 0 else None
for step in range(10):
    if rank == 0:
        array = {array}
        array[0] = step
        places.add(plain(array).ctypes.data)
        send(array, 1, view=True)
        del array
    elif rank == 1:
        array = recv(src=0)
        array.sum()
        del array
    gc.collect()
    time.sleep(0.01)
len(places)
"""


@pytest.mark.slow
def test_memory_that_is_used_again(three_ranks: Session) -> None:
    """Two arrays, one after the other, at one address do not race; one array that is written again does."""
    new, kept = (
        three_ranks.run(REUSED.format(array=array), namespace={}, check_races=True)
        for array in ("nbp.zeros(50_000)", "kept")
    )
    assert new.values[0] < 10, "no memory was used again"
    assert str(new.race_report) == "no race among 20 accesses"
    assert kept.races
    three_ranks.run("del kept")


@pytest.mark.slow
def test_a_log_that_is_sent_in_parts(three_ranks: Session) -> None:
    """What was sent before the end is compared like the rest, and of a rank that dies it is all there is."""
    three_ranks.run(
        "from nbparallel.distributed.races import checked_cell\ncheck = checked_cell.CheckedCell\n"
        "checked_cell.LIMIT_NBYTES, parts, log = 5_000, [0], check.log\n"
        "def counted(self):\n"
        "    parts[0] += 1\n"
        "    return log(self)\n"
        "check.log = counted"
    )
    steps = (
        "for step in range(200):\n    grid[rank] = step\n    barrier()\n    value = grid[(rank + 1) % 3]\n"
    )
    report = checked(three_ranks, steps + "    barrier()")
    assert str(report).startswith("no race among 1,200 accesses")
    assert all(count >= 4 for count in three_ranks.run("parts[0]").values)
    assert checked(three_ranks, "counter[0] += 1\n" + steps).races[0].lines == (1, 1)
    with pytest.raises(ParallelError) as raised:
        checked(
            three_ranks, "counter[0] += 1\n" + steps + "import os\nif rank == 1:\n    os.kill(os.getpid(), 9)"
        )
    text = str(raised.value.result.race_report)
    assert "what rank 1 did" in text
    assert "ranks 0-2 each read and wrote it on line 1" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "part = counter[:0]",
        "part = dist.shard(counter)",  # 2 elements for 3 ranks
        "part = square[1:1, :].T; part[...] = 1",
    ],
)
def test_an_empty_part_of_a_shared_array(three_ranks: Session, source: str) -> None:
    """It lies nowhere, and is found all the same: the cell ends, and so does the next one."""
    for cell in (source, "part.sum()"):
        three_ranks.run(NAP)
        result = three_ranks.run(
            cell, namespace=notebook(), share=SHARED, check_races=True, timeout=20 * processes.patience()
        )
        assert str(result.race_report).startswith("no race"), cell
    assert three_ranks.run("type(part).__name__").values == ["ndarray"] * 3


def test_the_bases_of_a_traced_array_end(three_ranks: Session) -> None:
    """Two more than of the plain one, for what stands for the array itself; writing by one is seen."""
    source = """
def depth(x):
    steps = 0
    while isinstance(x.base, np.ndarray):
        x, steps = x.base, steps + 1
        assert steps < 20
    return steps
depths = [depth(x) for x in (grid, grid[2:4], grid[2:4][:1], grid.reshape(3, 4).T, square[:, 0])]
"""
    names = notebook()
    three_ranks.run(source, namespace=names, share=SHARED)
    plain = three_ranks.run("depths").values
    three_ranks.run(
        source, namespace=names, share=SHARED, check_races=True, timeout=20 * processes.patience()
    )
    traced = three_ranks.run("depths").values
    for one, other in zip(plain[0], traced[0], strict=True):
        assert one <= other <= one + 2, (plain, traced)
    report = str(checked(three_ranks, "grid[2:4].base[0] = rank"))
    assert "data race" in report, report
