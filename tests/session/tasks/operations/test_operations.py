"""The operations as a cell calls them: predefined, on shared arrays of the notebook, in groups."""

from __future__ import annotations

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.distributed.api.operation_base import PREDEFINED
from nbparallel.errors import ParallelError
from nbparallel.session import Session


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_every_operation_is_there(three_ranks: Session) -> None:
    """Every operation of the promise has its name in a cell, works there, and stays one of `dist`."""
    x = nbp.share(np.arange(40_000.0))
    code = "[name for name in names if globals()[name] is getattr(dist, name)]"
    assert three_ranks.run(code, namespace={"names": PREDEFINED}).values[2] == list(PREDEFINED)
    code = """
whole = all_gather(nbp.share(all_to_all(x)[0]), view=True)
total = reduce(float(x.sum()), dst=1)
mine = reduce_scatter(x)
part = scatter(x if rank == 0 else None)
pair = dist.new_group([0, 2])
both = gather(rank, dst=2, group=pair) if rank != 1 else None
(total, float(mine.sum()), part.shape, float(sum(w.sum() for w in whole)), both)
"""
    values = three_ranks.run(code, namespace={"x": x}).values
    third = np.array_split(x, 3)
    for rank in range(3):
        assert values[rank] == (
            3 * float(x.sum()) if rank == 1 else None,
            3 * float(third[rank].sum()),
            third[rank].shape,
            sum(float(third[r].sum()) for r in range(3)),
            [0, 2] if rank == 2 else None,
        )
    # A group is a value: it outlives its cell, and works in a cell of its members alone.
    assert three_ranks.run("all_gather(rank, group=pair)", ranks=(0, 2)).values == [[0, 2], [0, 2]]
    with pytest.raises(ParallelError, match="rank 1 is not in this cell"):
        three_ranks.run("all_gather(rank)", ranks=(0, 2))
    assert three_ranks.run("all_gather(rank, group=pair) if rank != 1 else 'outside'").values[1] == "outside"


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_work_that_nobody_waited_for(two_ranks: Session) -> None:
    """It is named under the cell with its line, on the rank that forgot it; the next cell goes on."""
    result = two_ranks.run("x = 0\nw = irecv(src=1) if rank == 0 else isend(1, 0)\nbarrier()")
    assert "irecv(src=1) on line 2 was not waited for" in result.ranks[0].stderr
    assert result.ranks[1].stderr == ""
    result = two_ranks.run("w.wait(), w.result()")
    assert list(result.values) == [(True, 1), (True, None)]
    two_ranks.run("import time\nw = irecv(src=1) if rank == 0 else isend(2, 0)\ntime.sleep(0.5)")
    assert two_ranks.run("w.result()").values[0] == 2, "what had come is taken at the end of the cell"
    assert two_ranks.run("w = irecv(src=1 - rank)").ranks[1].stderr
    with pytest.raises(ParallelError, match=r"StaleWorkError on rank 0.*irecv.*ended since"):
        two_ranks.run("w.wait()", ranks=(0,))


SLOW = """
import os, time
import numpy as np
class Slow:
    def __reduce__(self):
        return slowly, ()
def slowly():
    if os.environ["RANK"] == "2":
        time.sleep(0.3)
right = []
for i in range(3):
    found = all_gather(Slow() if rank == 0 else np.full(300_000, float(i)))
    right.append(bool((found[1] == i).all()))
right
"""


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_a_slow_reader_keeps_what_it_reads(three_ranks: Session) -> None:
    """Copies that a sender made for its readers stay until the last of them has read, whatever comes next."""
    assert list(three_ranks.run(SLOW).values) == [[True] * 3] * 3


APART = """
import numpy as np
pair = dist.new_group([0, 1])
if rank == 2:
    raise ValueError("not my business")
x = nbp.share(np.full(300_000, float(rank)))
all_reduce(x, group=pair)
both = all_gather(x, group=pair)
w = all_reduce(rank, group=pair, async_op=True)
float(x[0] + both[0][0] + reduce_scatter(x, group=pair)[0]) + w.result()
"""


@pytest.mark.time_limit(60)
def test_a_group_goes_on_without_who_failed(three_ranks: Session) -> None:
    """With --on-error continue the failure of a rank that is in no group of mine does not concern me."""
    with pytest.raises(ParallelError) as error:
        three_ranks.run(APART, on_error="continue")
    assert list(error.value.errors) == [2]
    assert [error.value.result.values[rank] for rank in (0, 1)] == [5.0, 5.0]


@pytest.mark.slow
def test_an_error_that_a_cell_catches_leaves_the_next_cell_alone(two_ranks: Session) -> None:
    """The message says "until the next cell", so the next cell has fresh rings."""
    catching = """
from nbparallel.errors import CollectiveTimeoutError
said = None
if rank == 0:
    try:
        all_reduce(1, timeout=0.2)
    except CollectiveTimeoutError as error:
        said = str(error)
else:
    import time
    time.sleep(1.0)
said
"""
    said, nothing = two_ranks.run(catching).values
    assert said.endswith("rank 1 did not arrive")
    assert nothing is None
    assert two_ranks.run("all_reduce(1)").values == [2, 2]


@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("size", [12, 400_000])
def test_broadcast_of_the_notebooks_array_is_nothing_to_do(size: int, three_ranks: Session) -> None:
    """All ranks see the same memory, read-only for them; another part of it is refused, and all go on."""
    names = {"x": np.arange(float(size)), "np": np}
    third = size // 3
    tries = f"""
parts = [x[{third} * r :][: {third}] for r in range(3)]
said = []
for mine in (parts[rank], np.zeros({third}) if rank == 1 else parts[rank], parts[rank // 2]):
    try:
        broadcast(mine, src=1)
    except ValueError as error:
        said.append("read-only" if "read-only" in str(error) else "overlapping")
all_reduce(1), said
"""
    same = "[broadcast(v, src=1) is v for v in (x, x[::2], x[2:-2], x.reshape(2, -1).T)]"
    assert three_ranks.run(same, namespace=names).values == [[True] * 4] * 3
    found = three_ranks.run(tries, namespace=names).values
    assert found == [(3, ["read-only"] * 2), (3, []), (3, ["read-only"] * 3)]
    assert (names["x"] == np.arange(size)).all()
