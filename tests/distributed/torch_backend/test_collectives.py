"""torch's collectives and messages over our memory: bit for bit what gloo gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import nbparallel as nbp
from tests.distributed.torch_backend.programs import COLLECTIVES, MESSAGES

CALL = "matrix({dtypes}, {shapes}, {members}, {modes})"
ALL_DTYPES = ["float32", "float64", "float16", "uint8", "int8", "int32", "int64"]


def matrix(**choices: object) -> str:
    """Return the program with some dtypes, shapes, groups and modes."""
    return COLLECTIVES + CALL.format(**choices)


@pytest.mark.slow
def test_collectives_as_over_gloo(session: nbp.Session, both: Callable[..., list[object]]) -> None:
    """Every collective of the world and of a group gives gloo's bits, blocking or not."""
    choices = {"dtypes": ["float32", "int64"], "shapes": [(2, 3)], "members": [None, [0, 1]]}
    values = both(session, matrix(**choices, modes=[False, True]))
    assert len(values[0]) == 8


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("members", [[None], [[0, 2], [1, 2, 3], [3, 1, 0, 2]]])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_all_dtypes_and_shapes(
    four: nbp.Session, both: Callable[..., list[object]], members: object, asynchronous: bool
) -> None:
    """The same for all dtypes that gloo has, for other shapes, four ranks and overlapping groups."""
    shapes = [(1,), (2, 3), (4097,), (0, 3)]
    both(four, matrix(dtypes=ALL_DTYPES, shapes=shapes, members=members, modes=[asynchronous]))


@pytest.mark.slow
def test_messages_and_objects_as_over_gloo(session: nbp.Session, both: Callable[..., list[object]]) -> None:
    """send, recv, isend, irecv, tags, any source, batches, lists of objects and coalesced operations."""
    both(session, MESSAGES)


@pytest.mark.slow
def test_messages_of_four(four: nbp.Session, both: Callable[..., list[object]]) -> None:
    """The same between four ranks."""
    both(four, MESSAGES)


def test_what_gloo_lacks(session: nbp.Session) -> None:
    """int16 and bfloat16 are reduced, tensors that are not contiguous filled, and 0-d ones reduced."""
    found = session.run(
        """
td.init_process_group()
a = torch.full((3,), rank + 1, dtype=torch.int16); td.all_reduce(a)
b = torch.full((3,), rank + 1.5, dtype=torch.bfloat16); td.all_reduce(b)
c = torch.zeros(2, 3).t(); c += rank; td.all_reduce(c)
d = torch.tensor(float(rank)); td.all_reduce(d, td.ReduceOp.AVG)
e = torch.zeros(3, requires_grad=True); td.broadcast(e, 1)
a.tolist(), b.tolist(), c.tolist(), d.item(), td.get_backend()
""",
        namespace={},
    ).values
    assert list(found) == [([3] * 3, [4.0] * 3, [[1.0, 1.0]] * 3, 0.5, "nbparallel")] * 2


def test_sparse_tensors(session: nbp.Session, both: Callable[..., list[object]]) -> None:
    """Sparse tensors with other numbers of elements on each rank are summed in place, as over gloo."""
    both(
        session,
        """
rank = td.get_rank()
x = torch.sparse_coo_tensor(torch.arange(rank + 1)[None], torch.ones(rank + 1), (4,))
td.all_reduce(x)
work = td.all_reduce(x, async_op=True)
work.wait()
x.to_dense().tolist()
""",
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_tensors_are_read_in_place(
    both: Callable[..., list[object]], session: nbp.Session, dtype: str
) -> None:
    """Reductions and movements of private tensors give gloo's values, in one copy."""
    program = f"""
from nbparallel.distributed.runtime import peer_memory
reads, read = [], peer_memory.PeerMemory.read
peer_memory.PeerMemory.read = lambda *arguments: reads.append(1) or read(*arguments)
rank = td.get_rank()
x = (torch.arange(5 << 20) % 7 + rank).to(torch.{dtype})
found = [x.clone(), *(torch.empty_like(x) for _ in range(4))]
for later in (False, True, False):
    found[0][...] = x
    works = [
        td.all_reduce(found[0], async_op=later),
        td.broadcast(found[1] if rank else found[0], 0, async_op=later),
        td.all_gather(found[2:4], x, async_op=later),
        td.all_to_all_single(found[4], x, async_op=later),
    ]
    for work in works:
        if work is not None:
            work.wait()
peer_memory.PeerMemory.read = read
assert bool(reads) == (td.get_backend() == "nbparallel")
td.destroy_process_group()
[hash(f.view(torch.uint8).numpy().tobytes()) for f in found[:1] + found[2 - rank:]]
"""
    both(session, program)
