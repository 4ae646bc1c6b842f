"""Tensors that an operation cannot fill: one error that says what to pass, and no rank is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nbparallel as nbp

CALLS = {
    "all_reduce": "td.all_reduce(x)",
    "reduce": "td.reduce(x, 0)",
    "recv": "td.recv(x, 1 - rank) if rank else td.send(y, 1)",
    "all_gather": "td.all_gather([x, y], y)",
    "all_gather_single": "td.all_gather_into_tensor(x, y[: y.numel() // 2])",
    "gather": "td.gather(y, [x, y.clone()] if rank == 0 else None, 0)",
    "scatter": "td.scatter(x, [y, y] if rank == 0 else None, 0)",
    "reduce_scatter": "td.reduce_scatter(x, [y, y])",
    "reduce_scatter_single": "td.reduce_scatter_tensor(x, torch.cat([y, y]))",
    "all_to_all": "td.all_to_all([x[: len(x) // 2], x[len(x) // 2 :]], list(y.chunk(2)))",
    "all_to_all_single": "td.all_to_all_single(x, y)",
    "broadcast": "td.broadcast(x if rank else y, 0)",
}


@pytest.fixture(scope="module")
def names(session: nbp.Session) -> dict[str, Any]:
    """Return names of the notebook, one of them an array that all ranks have, for reading only."""
    names = {"numbers": np.ones(1 << 16)}
    session.run("numbers.sum()", namespace=names)
    return names


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_memory_for_reading_only(session: nbp.Session, names: dict[str, Any], call: str) -> None:
    """A tensor over an array that ranks may only read is refused: writing would end the rank."""
    begin = """
import warnings
td.init_process_group()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    x = torch.from_numpy(numbers)
y = torch.ones(len(x), dtype=torch.float64)
"""
    with pytest.raises(nbp.ParallelError, match=r"x\.clone\(\)") as caught:
        session.run(begin + call, namespace=names)
    assert "x.copy()" not in str(caught.value)
    assert list(session.run("y.sum().item()", namespace={}).values) == [1 << 16] * 2


@pytest.mark.slow
def test_the_same_memory_for_reading_only(session: nbp.Session, names: dict[str, Any]) -> None:
    """Senders read such a tensor, and a broadcast between ranks of the same memory writes nothing."""
    found = session.run(
        """
import warnings
td.init_process_group()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    x = torch.from_numpy(numbers)
td.broadcast(x, 0)
total = torch.zeros_like(x)
td.reduce_scatter(total, [x, x])
total.sum().item()
""",
        namespace=names,
    ).values
    assert list(found) == [2 << 16] * 2


@pytest.mark.parametrize(
    ("tensor", "instead"),
    [
        ("torch.ones(1).expand(3)", r"x\.contiguous\(\)"),
        ("(torch.ones(3) * 1j).conj().imag", r"x\.resolve_conj\(\)"),
    ],
)
def test_views_that_cannot_be_filled(session: nbp.Session, tensor: str, instead: str) -> None:
    """A view that repeats its elements, or negates them, is refused with torch's way to a plain tensor."""
    with pytest.raises(nbp.ParallelError, match=instead):
        session.run(f"td.init_process_group()\ntd.all_to_all_single({tensor}, torch.ones(4))", namespace={})


@pytest.mark.slow
def test_an_output_that_is_no_rows_without_a_copy_is_refused(session: nbp.Session) -> None:
    """What was gathered would be lost in the copy."""
    with pytest.raises(nbp.ParallelError, match=r"strides \(1, 3\) as 2 rows .* pass `x\.contiguous\(\)`"):
        session.run(
            "td.init_process_group()\ntd.all_gather_into_tensor(torch.zeros(2, 3).t(), torch.ones(3))",
            namespace={},
        )
