"""Advice in the errors of operations: what stands in backticks is typed as it is printed, and works."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.errors import ParallelError
from nbparallel.session import Session

VIEW = "x = x + 1\n{}\nsend(x, rank, view=True)\nrecv(src=rank)[5]"
PARTS, SUMS = [[0, 1], [2, 3], [4, 5]], [[0, 3, 6, 9, 12, 15]] * 3
FIRST = "[send(rank, r, tag=3) for r in range(3) if rank == 0]\n"
CALLS: list[tuple[str, str, str, list[Any]]] = [
    ("scatter(x)", "scatter(x if rank == 0 else None)", "{}.tolist()", PARTS),
    ("scatter(x)", "dist.shard(x)", "{}.tolist()", PARTS),
    ("scatter(big)", "scatter(big if rank == 0 else None)", "{}.tolist()", PARTS),
    ("scatter(big, src=1)", "dist.shard(big)", "{}.tolist()", PARTS),
    ("all_reduce(big)", "big.copy()", "all_reduce({}).tolist()", SUMS),
    ("recv(big, 0, tag=3)", "big = recv(src=0, tag=3)", FIRST + "{}\nbig", [0] * 3),
    ("scatter(x, src=2)", "scatter(x if rank == 2 else None, src=2)", "{}.tolist()", PARTS),
    ("scatter(list(x)[:3])", "scatter(x if rank == 0 else None)", "{}.tolist()", PARTS),
    ("all_reduce(x)", "x.copy()", "all_reduce({}).tolist()", SUMS),
    ("all_reduce(x, async_op=True)", "x.copy()", "all_reduce({}, async_op=True).result().tolist()", SUMS),
    ("all_reduce(w)", "dist.shard(x)", "x = w\nall_reduce({}).tolist()", [[9, 9]] * 3),
    ("all_reduce(w)", "x.copy()", "x = w\nall_reduce({}).tolist()", [[9] * 6] * 3),
    ("broadcast(x[rank:][:3])", "x.copy()", "broadcast({})[5]", [5] * 3),
    ("broadcast(x, async_op=True)", "x.copy()", "broadcast({}, async_op=True).result()[5]", [5] * 3),
    ("send(-x, rank)\nrecv(x, rank)", "x = recv(src=RANK)", "send(-x, rank)\n{}\nx[5]", [-5] * 3),
    ("recv([0], src=0, tag=3)", "x = recv(src=0, tag=3)", FIRST + "{}\nx", [0] * 3),
    ("recv(0, tag=3)", "recv(src=0, tag=3)", FIRST + "{}", [0] * 3),
    ("sendrecv(x, rank, rank, output=x)", "x.copy()", "sendrecv(-x, rank, rank, output={})[5]", [-5] * 3),
    ("all_gather([x, x, x], x)", "x.copy()", "all_gather([{}, {}, {}], -x)[1][5]", [-5] * 3),
    ("reduce_scatter(output=x, input_list=[x] * 3)", "x.copy()", "reduce_scatter({}, [x] * 3)[5]", [15] * 3),
    ("dist.average_gradients([x])", "x.copy()", "dist.average_gradients([{}])[0][5]", [5] * 3),
    ("send(x + 1, rank, view=True)", "x = nbp.share(x)", VIEW, [6] * 3),
    ("dist.local_slice(x)", "dist.local_slice(len(x))", "{}.start", [0, 2, 4]),
    ("dist.local_slice(x)", "dist.shard(x)", "{}[0]", [0, 2, 4]),
]
"""What is called, what the error advises, what is typed then, and what each rank gets."""


@pytest.mark.slow
@pytest.mark.time_limit(120)
def test_what_errors_advise_works() -> None:
    """Every operation of the list, on an array of the notebook, or a shared one that ranks may write."""
    with Session(3) as session:
        for call, advice, then, expected in CALLS:
            names = {"x": np.arange(6.0), "big": np.arange(6.0), "w": nbp.full(6, 3.0), "np": np}
            session.run("x, big, w", namespace=names)
            with pytest.raises(ParallelError) as error:
                session.run(call, namespace=names)
            for rank, failure in error.value.errors.items():
                said = re.findall(r"`([^`]*)`", str(failure))
                assert advice.replace("RANK", str(rank)) in said, (call, str(failure))
                assert "--share" not in str(failure)
            typed = then.replace("{}", advice.replace("RANK", "rank"))
            assert list(session.run(typed, namespace=names).values) == expected, (call, typed)
