"""F50: arrays and messages beyond 2**31 and 2**32 bytes, in memory that really exists."""

import pytest

import nbparallel as nbp
from nbparallel.sharing.memory.memory_limits import limits

pytestmark = [pytest.mark.stress, pytest.mark.once, pytest.mark.slow, pytest.mark.time_limit(600)]


def require_free(nbytes):
    """Skip where the machine has not enough memory."""
    free = min((limit.free for limit in limits()), default=0)
    if free < nbytes:
        pytest.skip(f"needs {nbytes >> 30} GiB of memory, {free >> 30} GiB are free")


@pytest.fixture
def ranks():
    """Start two ranks for one test: their memory goes with them."""
    with nbp.Session(2) as session:
        session.run("pass", namespace={})
        yield session


@pytest.mark.parametrize("nbytes", [2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32, 2**32 + 1])
def test_f50_an_array_of_this_size_is_shared(ranks, nbytes):
    """Ranks read and write its last byte, and a view of it behind the boundary."""
    require_free(nbytes + (4 << 30))
    names = {"x": nbp.zeros(nbytes, "u1")}
    names["x"][-1] = 7
    names["tail"] = names["x"][-5::-2][:2]
    cell = "last = int(x[-1])\nx[-1 - rank - 1] = rank + 1\nbarrier()\nlast, x.nbytes, int(tail[0])"
    assert ranks.run(cell, namespace=names).values == [(7, nbytes, 0)] * 2
    assert names["x"][-3:].tolist() == [2, 1, 7]
    names.clear()
    ranks.run("pass", namespace=names)


def test_f50_a_message_of_this_size_arrives(ranks):
    """A message by value of more than 2 GiB is the receiver's own, whole to the last byte."""
    nbytes = 2**31 + 1
    require_free(4 * nbytes)
    cell = f"""
import numpy as np
if rank == 0:
    mine = np.zeros({nbytes}, "u1")
    mine[0], mine[2**31 - 1:] = 1, 5
    send(mine, 1)
    del mine
else:
    mine = recv(src=0)
    found = mine.nbytes, int(mine[0]), mine[2**31 - 2:].tolist()
    del mine
found if rank else None
"""
    assert ranks.run(cell).values == [None, (nbytes, 1, [0, 5, 5])]
