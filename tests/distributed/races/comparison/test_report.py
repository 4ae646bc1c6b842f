"""The report of a checked cell: each race in a sentence to act on, and what could not be checked."""

from __future__ import annotations

import html.parser
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed.races import byte_sets as overlap_module, walk
from nbparallel.distributed.races.access_log import (
    POSSIBLE,
    READ,
    WRITE,
    AccessLog,
    ArrayName,
    Box,
    MemoryAccess,
    Publish,
    Site,
)
from nbparallel.distributed.races.report import RaceReport, compare, verb
from tests.distributed.races.comparison.recorded import AnyArray, Recorded, play

PROGRAMS: dict[str, tuple[int, str, dict[str, Any], list[str]]] = {
    # how many ranks do what, with which arrays; what is said
    "all ranks add to one element": (
        4, "all adds counter on 1", {"counter": 1},
        ["`counter[0]`: ranks 0-3 each read and wrote it on line 1, and nothing orders them. "
         '→ `with dist.lock("counter"):` around it, or add up your own and `all_reduce`'],
    ),
    "a neighbour's edge is read while it is written": (
        2, "0 writes grid[0:8] on 5; 1 reads grid[7:8] on 3", {"grid": 16},
        ["`grid[7]`: rank 0 wrote `grid[0:8]` on line 5, rank 1 read it on line 3, "
         "and nothing orders the two. → `barrier()` between them"],
    ),
    "read before the barrier, and after it": (
        3, "all writes total[10 * r:][:10] on 4; 0 reads total on 5; barrier; 1 reads total on 7",
        {"total": 30},
        ["`total[10:20]`: rank 1 wrote it on line 4, rank 0 read `total` on line 5, "
         "and nothing orders the two. Likewise `total[20:30]` (ranks 0, 2). → `barrier()` between them"],
    ),
    "parts that are one element too long": (
        4, "all writes a[5 * r:][:6] on 2", {"a": 20},
        ["`a[5]`: ranks 0-1 each wrote it on line 2, and nothing orders them. "
         "Likewise `a[10]` (ranks 1-2) and `a[15]` (ranks 2-3). "
         "→ have each rank write its own part: `dist.local_slice`"],
    ),
    "too long, and added to: probably not what was meant, so a lock comes second": (
        2, "all adds a[4 * r:][:5] on 2", {"a": 9},
        ["`a[4]`: ranks 0-1 each read and wrote it on line 2, and nothing orders them. "
         '→ have each rank write its own part: `dist.local_slice`; or `with dist.lock("a"):` around it'],
    ),
    "rows and columns": (
        2, "0 writes m[1] on 3; 1 writes m.T[2] on 4", {"m": (6, 6)},
        ["`m[1, 2]`: rank 0 wrote `m[1, :]` on line 3, rank 1 wrote `m[:, 2]` on line 4, "
         "and nothing orders the two. → `barrier()` between them if one is to come first, "
         "else have each rank write its own part: `dist.local_slice`"],
    ),
    "a result goes into an array that is read on the same line": (
        2, "0 reads x on 2; 0 writes y on 2; 1 reads y on 2", {"x": 8, "y": 8},
        ["`y`: rank 0 wrote it and rank 1 read it on line 2, and nothing orders the two. "
         "→ have all ranks read first, then `barrier()`, then write; or write into a second array"],
    ),
    "of three steps the second lacks its barrier": (
        2, "0 writes a[0:2] on 3; barrier; 1 reads a[1:3] on 4; barrier; 0 writes a[0:2] on 5; "
        "1 reads a[1:3] on 6; barrier; 0 writes a[0:2] on 7; barrier; 1 reads a[1:3] on 8", {"a": 4},
        ["`a[1]`: rank 0 wrote `a[0:2]` on line 5, rank 1 read `a[1:3]` on line 6, "
         "and nothing orders the two. → `barrier()` between them"],
    ),
    "two branches add to one counter": (
        2, "all adds n on 3 + r", {"n": 1},
        ["`n[0]`: rank 0 read and wrote it on line 3, rank 1 read and wrote it on line 4, "
         'and nothing orders the two. → `with dist.lock("n"):` around each of the two'],
    ),
    "a first value that others add to": (
        2, "0 writes n on 2; 1 adds n on 4", {"n": 1},
        ["`n[0]`: rank 0 wrote it on line 2, rank 1 read and wrote it on line 4, and nothing orders the two. "
         "→ `barrier()` between them if one is to come first, else have each rank write its own part: "
         "`dist.local_slice`"],
    ),
    "each takes the next: a lock around one line alone lets two take the same number": (
        2, "all reads n on 3; all adds n on 4", {"n": 1},
        ["`n[0]`: ranks 0-1 wrote it on line 4, ranks 0-1 read it on line 3, and nothing orders "
         "them. → `barrier()` between them if one is to come first, else "
         '`with dist.lock("n"):` around both together',
         "`n[0]`: ranks 0-1 each read and wrote it on line 4, and nothing orders them. "
         '→ `with dist.lock("n"):` around it, or add up your own and `all_reduce`'],
    ),
    "the largest of all: a barrier would let a smaller one win": (
        3, "all reads n on 2; 1 writes n on 3; 2 writes n on 3", {"n": 1},
        ["`n[0]`: ranks 1-2 wrote it on line 3, ranks 0-2 read it on line 2, and nothing orders them. "
         "→ `barrier()` between them if one is to come first, else "
         '`with dist.lock("n"):` around both together',
         "`n[0]`: ranks 1-2 each wrote it on line 3, and nothing orders them. "
         "→ have each rank write its own part: `dist.local_slice`"],
    ),
    "a whole array is no counter: a lock alone would let each rank do the work once more": (
        2, "all adds m on 1", {"m": (2, 2)},
        ["`m`: ranks 0-1 each read and wrote it on line 1, and nothing orders them. → "
         "if it is to be done once, each rank its own part (`dist.local_slice`), or a second array; "
         'if all are to add to it, `with dist.lock("m"):` around it, or `all_reduce`'],
    ),
    "nor is it on two lines": (
        2, "all adds m on 1 + r", {"m": (2, 2)},
        ["`m`: rank 0 read and wrote it on line 1, rank 1 read and wrote it on line 2, "
         "and nothing orders the two. → `barrier()` between them if one is to come first, else "
         '`with dist.lock("m"):` around each of the two'],
    ),
    "a polled flag orders nothing": (
        2, "0 writes data on 2; 0 writes flag on 3; 1 reads flag on 5; 1 reads data on 6",
        {"flag": 1, "data": 3},
        ["`flag[0]`: rank 0 wrote it on line 3, rank 1 read it on line 5, and nothing orders the two. "
         "→ `barrier()` between them",
         "`data`: rank 0 wrote it on line 2, rank 1 read it on line 6, and nothing orders the two. "
         "→ `barrier()` between them"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_race_in_words(name: str) -> None:
    """What was touched, by whom, on which lines, and what to do about it."""
    ranks, program, arrays, wanted = PROGRAMS[name]
    assert [str(race) for race in compare(play(ranks, program, **arrays).logs()).races] == wanted


def test_a_race_in_its_fields() -> None:
    """Neighbours' edges are one race, whichever are concerned; a program finds the same as a reader."""
    program = "all reads grid[max(8 * r - 1, 0):8 * r + 9] on 3; all writes grid[8 * r:][:8] on 5"
    (race,) = compare(play(4, program, grid=(32, 6)).logs()).races
    assert str(race) == (
        "`grid[7, :]`: rank 0 wrote `grid[0:8, :]` on line 5, rank 1 read `grid[7:17, :]` on line 3, "
        "and nothing orders the two. Likewise `grid[8, :]` (ranks 0-1), `grid[15, :]` (ranks 1-2) "
        "and 3 more places. → `barrier()` between them"
    )
    assert (race.array, race.indices, race.lines, race.cells) == ("grid", "grid[7, :]", (5, 3), ("", ""))
    assert (race.ranks, race.kinds) == (((0, 1, 2, 3), (0, 1, 2, 3)), ("wrote", "read"))
    assert (race.certain, race.harmless) == (True, False)


def test_the_same_number_by_all() -> None:
    """All ranks store the same value on one line, in each step another one."""
    cell = Recorded(4, done=np.zeros(1))
    for step in range(3):
        for rank in cell:
            rank.write(cell.arrays["done"], 4, step)
        cell.barrier()
    assert str(compare(cell.logs())).splitlines() == [
        "1 harmless race",
        "`done[0]`: ranks 0-3 each stored the same number on line 4. → harmless, one rank is enough",
    ]


def test_a_number_that_differs() -> None:
    """One rank that stores another number makes it a race, also if it stored the same one before."""
    cell = Recorded(3, done=np.zeros(1))
    for rank in cell:
        rank.write(cell.arrays["done"], 4, rank.rank == 2)
    assert "each wrote it on line 4" in str(compare(cell.logs()).races[0])
    cell = Recorded(2, done=np.zeros(1))
    cell[0].write(cell.arrays["done"], 4, 1)
    cell[0].events.append(Publish(("nothing",)))
    cell[0].write(cell.arrays["done"], 4, 2)
    cell[1].events.append(Publish(("nothing either",)))  # so that it is looked at later
    cell[1].write(cell.arrays["done"], 4, 2)
    assert "each wrote it on line 4" in str(compare(cell.logs()).races[0])


def test_a_possible_race() -> None:
    """Memory that went to a C library may have been written: the door is named."""
    cell = Recorded(2, w=np.zeros(8))
    cell[0].write(cell.arrays["w"][:4], 2)
    for kind in (READ | POSSIBLE, WRITE | POSSIBLE):
        cell[1].touch(cell.arrays["w"], kind, 3, door="torch.from_numpy")
    report = compare(cell.logs())
    assert str(report).splitlines() == [
        "1 possible race",
        "`w[0:4]`: rank 0 wrote it on line 2, rank 1 may have read and written `w` on line 3 "
        "(passed to `torch.from_numpy`, which may write), and nothing orders the two. "
        "→ `barrier()` between them if one is to come first, else have each rank write its own part: "
        "`dist.local_slice`; "
        "if what it was passed to only reads, pass a copy",
    ]
    assert not report.races[0].certain


def two_writers(array: AnyArray, **arrays: AnyArray) -> Recorded:
    """Return a cell in which two ranks write to an array."""
    cell = Recorded(2, a=array, **arrays)
    for rank in cell:
        rank.write(array, 1)
    return cell


def name_of(name: str, array: AnyArray, *, offset: int = 0, segment: int = 1) -> ArrayName:
    """Return a name for a part of the first segment."""
    return ArrayName(name, segment, offset, array.shape, array.strides, array.itemsize)


def shown(cell: Recorded, *names: ArrayName, rank_names: tuple[ArrayName, ...] = ()) -> str:
    """Return what is said to have been touched."""
    logs = [rank.log(rank_names) for rank in cell]
    return compare(logs, names).races[0].sentence.partition(": ")[0]


def test_the_notebook_s_names_come_first() -> None:
    """Then those of ranks; of several the one that holds most, and that no underscore hides."""
    big = np.zeros((4, 5))
    cell = Recorded(2, x=big)
    for rank in cell:
        rank.write(big[1, 2:4], 1)
    whole, hidden, row = name_of("x", big), name_of("_", big), name_of("row", big[1], offset=40)
    assert shown(cell, rank_names=(row, hidden, whole)) == "`x[1, 2:4]`"
    assert shown(cell, row, rank_names=(whole,)) == "`row[2:4]`"
    assert shown(cell, hidden, whole) == "`x[1, 2:4]`"
    assert shown(cell, name_of("other", big, segment=2), rank_names=(row,)) == "`row[2:4]`"


def test_an_array_without_a_name() -> None:
    """It is described by where it lies; the race has an empty name."""
    cell = two_writers(np.zeros(4))
    assert shown(cell) == "bytes 0 to 31 of a shared array without a name"
    assert compare(cell.logs(named=False)).races[0].array == ""
    part = name_of("part", np.zeros(2))
    assert shown(cell, part) == "bytes 0 to 31 of a shared array without a name"


def test_a_name_of_several_arrays() -> None:
    """A name that is another array on each rank is shown with its rank."""
    memory = np.zeros(12)
    cell = Recorded(2, memory=memory)
    logs = []
    for rank in cell:
        rank.write(memory[5 * rank.rank :][:7], 1)
        logs.append(rank.log((name_of("mine", memory[:7], offset=40 * rank.rank),)))
    (race,) = compare(logs).races
    assert race.sentence.startswith("`mine[5:7]` of rank 0: ranks 0-1 each wrote it")
    assert (race.array, race.indices) == ("mine", "mine[5:7]")
    assert compare(logs, [name_of("memory", memory)]).races[0].sentence.startswith("`memory[5:7]`: ranks")


def test_many_places_of_a_race() -> None:
    """They are not counted: not all are kept."""
    memory = np.zeros(90)
    cell = Recorded(2, a=memory)
    for rank in cell:
        for number in range(80):
            rank.write(memory[number : number + 2], 1)
    (race,) = compare(cell.logs()).races
    assert " Likewise `a[1]` (ranks 0-1), `a[1:3]` (ranks 0-1) and many more places. " in str(race)


def test_a_place_that_no_index_takes() -> None:
    """What was touched is then within the array."""
    array = np.zeros((6, 6))
    cell = Recorded(2, a=array)
    for rank in cell:
        rank.write(array[1:4, 1:4].diagonal(), 1)
    (race,) = compare(cell.logs()).races
    assert str(race).startswith("within `a`: ranks 0-1 each wrote it on line 1")


def test_other_cells_and_files() -> None:
    """A line of another cell is named with it; one that is not known is called so."""
    cell = Recorded(2, a=np.zeros(3))
    cell[0].write(cell.arrays["a"], 3, label="In[2]")
    cell[1].write(cell.arrays["a"], 0, label="steps.py")
    (race,) = compare(cell.logs()).races
    assert (
        "rank 0 wrote it on line 3 of In[2], rank 1 wrote it on a line that is not known of steps.py"
        in str(race)
    )
    assert (race.lines, race.cells) == ((3, 0), ("In[2]", "steps.py"))


def many_races(count: int) -> Recorded:
    """Return a cell with a race on each of its arrays."""
    cell = Recorded(2, **{f"a{number}": np.zeros(3) for number in range(count)})
    for rank in cell:
        for number, array in enumerate(cell.arrays.values()):
            rank.write(array, number + 1)
    return cell


def test_five_races_are_shown() -> None:
    """Of more, how many there are; the list has all."""
    report = compare(many_races(8).logs())
    lines = str(report).splitlines()
    assert (len(report.races), len(lines), lines[0], lines[-1]) == (8, 7, "8 data races", "and 3 more")
    assert "more" not in str(compare(many_races(5).logs()))


def test_one_line_with_many_arrays() -> None:
    """Each array is named, also those in one segment after many places of another one."""
    array = np.zeros(200)
    cell = Recorded(2, memory=array)
    for rank in cell:
        for number in range(150):
            rank.write(array[number : number + 1], 2)
        rank.write(array[190:], 2)
    names = name_of("a", array[:160]), name_of("b", array[180:], offset=1440)
    races = compare(cell.logs(named=False), names).races
    assert [race.indices for race in races] == ["a[0]", "b[10:20]"]


def test_a_certain_race_says_enough() -> None:
    """A possible one on the same two lines of the same array is left out."""
    cell = Recorded(2, a=np.zeros(3))
    a = cell.arrays["a"]
    cell[0].write(a, 1)
    cell[1].read(a, 2)
    cell[1].touch(a, WRITE | POSSIBLE, 2, door="memoryview")
    (race,) = compare(cell.logs()).races
    assert race.certain
    assert race.kinds == ("wrote", "read")


def test_certain_races_first() -> None:
    """Then possible ones, then harmless ones; the title counts each."""
    cell = Recorded(2, a=np.zeros(1), b=np.zeros(1), c=np.zeros(1))
    a, b, c = cell.arrays.values()
    for rank in cell:
        rank.write(a, 1, 5)
        rank.touch(b, WRITE | POSSIBLE, 2, door="numba")
        rank.write(c, 3)
    report = compare(cell.logs())
    assert [race.array for race in report.races] == ["c", "b", "a"]
    assert report.title == "1 data race, 1 possible race, 1 harmless race"
    assert (
        str(report)
        .splitlines()[2]
        .startswith(
            "`b[0]`: ranks 0-1 each may have written it on line 2 (passed to `numba`, which may write)"
        )
    )


def test_too_hard_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides that numpy and we give up on: the race is possible, and the sentence has the reason."""
    monkeypatch.setattr(overlap_module, "MAX_WORK", 1)
    memory = np.zeros(4000, np.uint8)
    cell = Recorded(2, a=memory)
    for rank, strides in zip(cell, ((31, 37, 41), (29, 43, 47)), strict=True):
        view = np.lib.stride_tricks.as_strided(memory[rank.rank :], (9, 9, 9), strides)
        rank.write(view, 1)
    (race,) = compare(cell.logs()).races
    assert not race.certain
    assert "Whether they touched the same elements was too hard to find out." in str(race)


# -- its form ------------------------------------------------------------------------------------------------


def test_no_access_at_all() -> None:
    """Of cells without shared arrays, or without ranks, too."""
    assert str(compare([])) == "no race: no access to shared arrays was seen"
    assert str(RaceReport((), 1)) == "no race among 1 access"
    assert str(RaceReport((), 1204)) == repr(RaceReport((), 1204)) == "no race among 1,204 accesses"


def test_an_empty_array() -> None:
    """A name without elements is no place; it hides no other name."""
    cell = two_writers(np.zeros(3))
    assert shown(cell, ArrayName("empty", 1, 0, (0, 3), (24, 8), 8), *cell.names) == "`a`"


def test_as_html() -> None:
    """Code looks like code, names of users are escaped, and elements are closed."""
    cell = two_writers(np.zeros(3))
    names = [ArrayName("<b>", 1, 0, (3,), (8,), 8)]
    found = compare(cell.logs(named=False), names)._repr_html_()
    assert found.startswith("<p><b>1 data race</b></p><ul><li><code>&lt;b&gt;</code>: ranks 0-1 each wrote")
    opened: list[str] = []
    parser = html.parser.HTMLParser()
    parser.handle_starttag = lambda tag, attributes: opened.append(tag)  # type: ignore[method-assign]
    parser.handle_endtag = lambda tag: opened.remove(tag)  # type: ignore[method-assign]
    parser.feed(found)
    assert not opened
    assert RaceReport((), 3)._repr_html_() == "<p><b>no race among 3 accesses</b></p>"


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        ([READ], "read"), ([WRITE, READ], "read and wrote"), ([READ | WRITE], "read and wrote"),
        ([READ | POSSIBLE], "may have read"), ([READ, WRITE | POSSIBLE], "read and may have written"),
        ([READ, READ | WRITE | POSSIBLE], "read and may have written"),
        ([READ | POSSIBLE, WRITE | POSSIBLE], "may have read and written"),
    ],
)  # fmt: skip
def test_what_was_done_in_words(kinds: list[int], text: str) -> None:
    """What was surely done is not said again as possible."""
    assert verb(kinds) == text


def test_ranks_without_a_log() -> None:
    """A rank that died has none: what the others did is compared, under their own numbers."""
    cell = Recorded(4, a=np.zeros(2))
    for rank in cell:
        rank.write(cell.arrays["a"], 1)
    logs = cell.logs()
    assert compare([logs[3], logs[1]]).races[0].ranks == ((1, 3), (1, 3))


def test_regions_of_other_kinds_in_one_segment() -> None:
    """An array seen as bytes and as numbers is one memory."""
    array = np.zeros(4)
    cell = Recorded(2, a=array)
    cell[0].write(array.view(np.uint8)[9:11], 1)
    cell[1].read(array, 2)
    (race,) = compare(cell.logs()).races
    assert race.indices == "a[1]"


# -- how long it takes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["rows", "columns", "tiles"])
def test_own_parts_are_not_compared_pair_by_pair(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of places beside each other, without any order between the ranks: few pairs are looked at."""
    count, compared = 2_000, [0]
    find = walk.find_overlap

    def counted(*places: Any) -> Any:
        compared[0] += 1
        return find(*places)

    def place(number: int) -> Box:
        row, column = divmod(number, 100)
        return {
            "rows": Box(number * 800, (100,), (8,), 8),
            "columns": Box(number * 8, (100,), (8 * 2 * count,), 8),
            "tiles": Box(row * 10 * 8_000 + column * 80, (10, 10), (8_000, 8), 8),
        }[shape]

    monkeypatch.setattr(walk, "find_overlap", counted)
    logs = [
        AccessLog(
            rank, (), tuple(MemoryAccess(0, 1, Site("", 1), WRITE, place(2 * n + rank)) for n in range(count))
        )
        for rank in (0, 1)
    ]
    assert compare(logs).races == ()
    assert compared[0] <= 4 * count


@pytest.mark.parametrize("bound", ["MOST_CONFLICTS", "MOST_WORK"])
def test_too_many_lines_are_said(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of lines that all race are thousands of pairs: the search ends, and says so."""
    monkeypatch.setattr(walk, bound, 100)
    accesses = tuple(
        MemoryAccess(0, 1, Site("", number + 1), WRITE, Box(8, (4,), (8,), 8)) for number in range(50)
    )
    report = compare(AccessLog(rank, (), accesses) for rank in (0, 1))
    assert 0 < len(report.races) <= 150
    assert report.not_checked == ("the rest of the cell, because too many accesses are in no order",)
