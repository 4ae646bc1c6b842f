"""`draw=` of `Session.run`, and `Session.draw`: what ranks hold before and after a cell, and where it was."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from nbparallel.errors import ParallelError
from nbparallel.session import Session
from nbparallel.session.results import DrawnValues
from nbparallel.testing.waiting import wait_until
from nbparallel.transfer import variable_info
from nbparallel_widgets.draw import NEW, SEVERAL, DrawnView, NumberOrigins, drawn_rows, value_text

START = "import numpy as np\nx = 10 * rank + np.arange(3)"
TRANSPOSED = [[[0, 1, 2]]] * 3
KEPT = [[[0, 0, 0]], [[1, 1, 1]], [[2, 2, 2]]]


def origins(drawn: DrawnValues, name: str) -> list[list[list[int]]]:
    """Return by rank and block where the numbers after a cell come from; nothing for words."""
    index = drawn.names.index(name)
    known = NumberOrigins(drawn, index)
    found = [
        [[known.of(n) for line in block.rows for n in line] for block in row.after or ()]
        for row in drawn_rows(drawn, index)
    ]
    return [[block for block in blocks if block] for blocks in found]


def held(drawn: DrawnValues, name: str, *, before: bool = False) -> list[str]:
    """Return what each rank held, in letters."""
    found = drawn_rows(drawn, drawn.names.index(name))
    return [value_text(row.before if before else row.after) for row in found]


COLLECTIVES = {
    "y = broadcast(x, src=1)": [[[1, 1, 1]]] * 3,
    "y = scatter(list(x) if rank == 2 else None, src=2)": [[[2]]] * 3,
    "y = gather(x, dst=0)": [[[0, 0, 0], [1, 1, 1], [2, 2, 2]], [], []],
    "y = all_gather(x)": [[[0, 0, 0], [1, 1, 1], [2, 2, 2]]] * 3,
    "y = reduce(x.copy(), dst=0)": [[[NEW] * 3], [], []],
    "y = all_reduce(x.copy())": [[[NEW] * 3]] * 3,
    "y = reduce_scatter(list(x))": [[[NEW]]] * 3,
    "y = all_to_all(x)": [[[0], [1], [2]]] * 3,
    "y = np.array(all_to_all(x)).ravel()": TRANSPOSED,
    "y = sendrecv(x, (rank + 1) % world_size, src=(rank - 1) % world_size)": KEPT[2:] + KEPT[:2],
}


@pytest.mark.slow
def test_colours_of_each_collective(three_ranks: Session) -> None:
    """Moved numbers keep their rank's colour, combined ones are new; what a cell does not touch stays."""
    for cell, expected in COLLECTIVES.items():
        three_ranks.run(f"{START}\nglobals().pop('y', None)")
        drawn = three_ranks.run(cell, draw="x,y").drawn
        assert drawn is not None
        assert origins(drawn, "y") == expected, cell
        assert origins(drawn, "x") == ([[[1] * 3]] * 3 if "broadcast" in cell else KEPT), cell
        assert held(drawn, "y", before=True) == ["not defined"] * 3
        assert held(drawn, "x", before=True) == ["0 1 2", "10 11 12", "20 21 22"]


@pytest.mark.slow
def test_numbers_of_several_ranks(three_ranks: Session) -> None:
    """A number that two ranks had before has no colour; True is not 1, and nan equals nothing."""
    three_ranks.run("a = [0, rank, True]; b = float('nan')")
    drawn = three_ranks.run("a.append(rank + 1)", draw=["a", "b"]).drawn
    assert drawn is not None
    assert origins(drawn, "a") == [
        [[SEVERAL], [SEVERAL], [SEVERAL], [1]],
        [[SEVERAL], [1], [SEVERAL], [2]],
        [[SEVERAL], [2], [SEVERAL], [NEW]],
    ]
    assert origins(drawn, "b") == [[[NEW]]] * 3
    assert held(drawn, "a")[0] == "0 | 0 | True | 1"


def test_of_names_now(three_ranks: Session) -> None:
    """`Session.draw` returns what names hold, each by itself; no cell has run, so its timeline stays."""
    three_ranks.run("a = rank; b = 0, rank; c = None; k = rank == 1 and 'text'")
    number = three_ranks.timeline().number  # type: ignore[union-attr]
    drawn = three_ranks.draw("a, b c k nothing")
    assert drawn.names == ("a", "b", "c", "k", "nothing")
    assert origins(drawn, "a") == [[[0]], [[1]], [[2]]]
    assert origins(drawn, "b") == [[[SEVERAL]] * 2, [[SEVERAL], [1]], [[SEVERAL], [2]]]
    assert held(drawn, "c") == ["None"] * 3
    assert held(drawn, "k") == ["False", "'text'", "False"]
    assert held(drawn, "nothing") == ["not defined"] * 3
    assert [drawn.is_missing(name) for name in drawn.names] == [False] * 4 + [True]
    assert three_ranks.timeline().number == number  # type: ignore[union-attr]


def test_names_that_the_cell_does_not_use(three_ranks: Session) -> None:
    """The notebook's value of a drawn name is delivered; one that the cell assigns is what ranks had."""
    names: dict[str, Any] = {"v": np.arange(3.0), "w": [7, 8], "assigned": 5}
    three_ranks.run("globals().pop('assigned', None)")
    drawn = three_ranks.run("assigned = rank", namespace=names, draw="v,w,assigned").drawn
    assert drawn is not None
    assert held(drawn, "v", before=True) == ["rank 0: 0 | rank 1: 1 | rank 2: 2"]  # one array
    assert held(drawn, "w") == ["7 | 8"] * 3
    assert held(drawn, "assigned", before=True) == ["not defined"] * 3
    assert held(drawn, "assigned") == ["0", "1", "2"]
    three_ranks.run("del v")  # others use these ranks
    drawn = three_ranks.submit("pass", namespace={"w": [9]}, draw="w").result().drawn
    assert drawn is not None
    assert held(drawn, "w") == ["9"] * 3


def test_shared_arrays_are_one_box(three_ranks: Session) -> None:
    """An array that is the same memory on all ranks is drawn once, with the part of each, begin and end."""
    names: dict[str, Any] = {"z": np.zeros(62)}
    drawn = three_ranks.run("z[rank] = rank + 5", namespace=names, share="z", draw="z").drawn
    assert drawn is not None
    (row,) = drawn_rows(drawn, 0)
    assert row.before is not None
    assert row.after is not None
    assert [block.rank for block in row.after] == [0, 1, 2]
    assert [block.count for block in row.after] == [21, 21, 20]
    assert row.before[0].rows == ((0, 0, 0, 0, 0),)
    assert row.after[0].rows == ((5, 6, 7, 0, 0),)  # whichever rank wrote last
    assert "rank 2: 0 0 0 0 0 … 15 more" in repr(DrawnView(drawn))


def test_parts_of_a_shared_array_are_rows(three_ranks: Session) -> None:
    """Views of different parts are what each rank holds, in the colour of its own."""
    names: dict[str, Any] = {"z": np.arange(9.0)}
    three_ranks.run("mine = dist.shard(z)", namespace=names)
    assert held(three_ranks.draw("mine"), "mine") == ["0 1 2", "3 4 5", "6 7 8"]


@pytest.mark.slow
def test_a_cell_that_fails_is_drawn(three_ranks: Session) -> None:
    """Each rank shows what it has when its part ends, also by an error; one that died, how."""
    three_ranks.run(START)
    with pytest.raises(ParallelError) as failed:
        three_ranks.run("x += 1\nbarrier()\nif rank == 1: raise ValueError\nbarrier()\nx += 1", draw="x")
    assert failed.value.result is not None
    drawn = failed.value.result.drawn
    assert drawn is not None
    assert held(drawn, "x") == ["1 2 3", "11 12 13", "21 22 23"]
    pending = three_ranks.submit(
        "import time\nx += 1\nprint('here', flush=True)\nwhile rank == 2: time.sleep(0.01)", draw="x"
    )
    wait_until(lambda: all("here" in pending.stdout(rank) for rank in range(3)))
    pending.cancel()
    stopped = pending.exception()
    assert isinstance(stopped, KeyboardInterrupt)
    drawn = stopped.result.drawn  # type: ignore[attr-defined]
    assert held(drawn, "x") == ["2 3 4", "12 13 14", "22 23 24"]
    with pytest.raises(ParallelError) as dead:
        three_ranks.run("import os\nif rank == 0: os._exit(3)\nbarrier()", draw="x")
    assert dead.value.result is not None
    drawn = dead.value.result.drawn
    assert drawn is not None
    assert list(drawn.ranks) == [1, 2]
    assert "exit code 3" in drawn.died[0]
    assert "exit code 3" in repr(DrawnView(drawn))


def test_some_ranks_and_cells_in_the_background(three_ranks: Session) -> None:
    """Only the ranks that run a cell are drawn; `submit` has the picture in its result."""
    three_ranks.run(START)
    drawn = three_ranks.submit("x *= 2", ranks=[0, 2], draw=("x",)).result().drawn
    assert drawn is not None
    assert list(drawn.ranks) == [0, 2]
    assert held(drawn, "x") == ["0 2 4", "40 42 44"]
    assert list(three_ranks.draw("x").only([1]).ranks) == [1]


def test_mistakes_in_names(two_ranks: Session) -> None:
    """What is no name is refused before anything runs."""
    with pytest.raises(ValueError, match=r"draw='x\[0\]' is no variable's name"):
        two_ranks.run("x = 1", draw="x[0]")
    with pytest.raises(TypeError, match="draw holds the names of variables"):
        two_ranks.draw([1])  # type: ignore[list-item]
    assert two_ranks.draw("x").is_missing("x")


def test_little_travels(two_ranks: Session) -> None:
    """Of a large value a few thousand numbers, whatever its layout; objects are words, unpickled."""
    two_ranks.run(
        "import numpy as np\n"
        "a = np.zeros((2000, 3000), order='F')[::2].T\nb = [np.zeros(10**6)] * 50\n"
        "class Evil:\n"
        "    def __repr__(self, *_): raise ValueError\n"
        "    __len__ = __reduce__ = __repr__\n"
        "c = Evil(); d = [c, 1]; e = {1: c}; f = 10 ** 5000; g = 'text' * 999\n"
        "h = np.empty(1, object); h[0] = c"
    )
    drawn = two_ranks.draw("a b c d e f g h")
    assert len(pickle.dumps(drawn)) < 200_000
    assert [len(drawn_rows(drawn, i)) for i in range(8)] == [2] * 8
    assert held(drawn, "c") == ["Evil"] * 2
    assert held(drawn, "d") == ["Evil | 1"] * 2
    assert held(drawn, "e") == ["dict of 1"] * 2
    assert held(drawn, "f") == ["a number of more than 64 bits"] * 2
    assert len(held(drawn, "g")[0]) < 30
    assert held(drawn, "h") == ["ndarray (1,) object"] * 2
    assert not NumberOrigins(drawn, 0).complete
    assert all(
        sum(len(line) for block in row.after or () for line in block.rows) <= variable_info.MOST_SHOWN
        for index in range(8)
        for row in drawn_rows(drawn, index)
    )


@pytest.mark.slow  # ranks import torch
def test_tensors_are_drawn_like_arrays(two_ranks: Session) -> None:
    """Also those that need a gradient or have elements that numpy lacks; a sparse one is in words."""
    pytest.importorskip("torch", reason="torch is not installed")
    two_ranks.run(
        "import torch\nt = torch.arange(5., 8) + 10 * rank\nt.requires_grad = True\n"
        "b = torch.tensor([[1.5, 2], [3, 4]], dtype=torch.bfloat16)\ns = torch.eye(3).to_sparse()"
    )
    drawn = two_ranks.run("b = b + 1", draw="t,b,s").drawn
    assert drawn is not None
    assert held(drawn, "t") == ["5 6 7", "15 16 17"]
    assert origins(drawn, "t") == [[[0] * 3], [[1] * 3]]
    assert held(drawn, "b") == ["2.5 3\n4 5"] * 2
    assert held(drawn, "s") == ["Tensor (3, 3) float32, sparse_coo"] * 2
