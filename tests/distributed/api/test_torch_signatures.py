"""Calls as torch.distributed's pages write them: places and names of arguments."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nbparallel.distributed as dist
from nbparallel.distributed import Communicator, Work

TORCH = {
    "send": "tensor dst group tag group_dst",
    "recv": "tensor src group tag group_src",
    "isend": "tensor dst group tag group_dst",
    "irecv": "tensor src group tag group_src",
    "broadcast": "tensor src group async_op group_src",
    "all_reduce": "tensor op group async_op",
    "reduce": "tensor dst op group async_op group_dst",
    "all_gather": "tensor_list tensor group async_op",
    "gather": "tensor gather_list dst group async_op group_dst",
    "scatter": "tensor scatter_list src group async_op group_src",
    "all_to_all": "output_tensor_list input_tensor_list group async_op",
    "barrier": "group async_op device_ids timeout",
}


@pytest.mark.parametrize("name", TORCH)
def test_arguments_stand_where_torch_has_them(name: str) -> None:
    """The first parameters are torch's, by position or name; and the function describes itself."""
    function = getattr(dist, name)
    parameters = inspect.signature(function).parameters.values()
    by_place = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert by_place == TORCH[name].split()
    assert "see `" not in (inspect.getdoc(function) or "")


def test_by_place_and_by_name(ranks: Any) -> None:
    """A place in a group as the last argument, and this rank's value by torch's name of it."""

    def work(c: Communicator) -> None:
        group, peer = c.new_group([0, 1]), 1 - c.rank
        dist.send(np.full(2, c.rank), None, group, 0, peer)
        assert dist.recv(None, None, group, 0, peer).tolist() == [peer, peer]
        sent, received = dist.isend(c.rank, None, group, 3, peer), dist.irecv(None, None, group, 3, peer)
        assert [sent.wait(), received.wait(), received.result()] == [True, True, peer]
        assert dist.broadcast(c.rank, None, group, False, 1) == 1
        assert dist.reduce(1, None, "sum", group, False, 1) == (2 if c.rank == 1 else None)
        assert dist.gather(c.rank, None, None, group, False, 1) == ([0, 1] if c.rank == 1 else None)
        assert dist.scatter([5, 6] if c.rank == 1 else None, None, None, group, False, 1) == 5 + c.rank
        assert dist.all_gather(tensor=c.rank) == [0, 1]
        assert dist.all_to_all(input_tensor_list=[c.rank, c.rank]) == [0, 1]
        assert dist.reduce_scatter(input_list=[1, 2]) == 2 * (1 + c.rank)
        part = np.zeros(1)
        assert dist.reduce_scatter(output=part, input_list=[np.ones(1), np.full(1, 2.0)]) is part
        assert part[0] == 2 * (1 + c.rank)
        dist.barrier(dist.group.WORLD, False, [c.rank])
        for call in (dist.all_gather, dist.all_to_all, dist.reduce_scatter):
            with pytest.raises(TypeError, match=rf"needs what this rank brings: {call.__name__}\(x\)"):
                call()
        with pytest.raises(TypeError, match="from an input_list"):
            dist.reduce_scatter(output=part)
        with pytest.raises(TypeError, match="write src=1"):
            dist.scatter([1, 2], 1)

    ranks(2, work)


def test_new_group_knows_its_arguments(ranks: Any) -> None:
    """Torch's further ones are taken, a misspelt one is not; and a group is a collection of its ranks."""

    def work(c: Communicator) -> None:
        group = dist.new_group(ranks=[2, 0], timeout=None, backend="gloo", use_local_synchronization=True)
        assert (list(group), len(group), 2 in group, 1 in group) == ([0, 2], 2, True, False)
        with pytest.raises(TypeError, match="no argument 'rnaks'"):
            dist.new_group(rnaks=[0])
        with pytest.raises(ValueError, match="sorts its ranks"):
            dist.new_group([2, 0], sort_ranks=False)
        if c.rank < 2:  # a group that begins as the world does is not the world
            with pytest.raises(ValueError, match="src=2 is not in the group of ranks 0-1"):
                dist.broadcast(1, src=2, group=dist.new_group([0, 1]))
        assert dist.is_available()

    ranks(3, work)


PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "torch-distributed.md"
HERE = {"group", *dist.__all__}
IMPORTED = {"log", "logging", "sys", "timedelta", "torch", "traceback", "typing"}
"""Names that torch's module itself has imported: no program looks for them there."""
OTHER_PARAMETERS = {"new_group", "reduce_scatter"}
"""Functions whose parameters differ, as the page says; what torch's scripts pass works."""
PROGRAM = """
import inspect, json, torch.distributed as dist

def parameters(name):
    try:
        return [p for p in inspect.signature(vars(dist)[name]).parameters if not p.startswith("_")]
    except (KeyError, TypeError, ValueError):
        return None  # deprecated, no function, or not one of Python

names = [name for name in dir(dist) if not name.startswith("_")]
members = {kind: dir(getattr(dist, kind)) for kind in ("Work", "ReduceOp")}
print(json.dumps([{name: parameters(name) for name in names}, members]))
"""


def missing_names() -> set[str]:
    """Return the names of the page's table of those that are not here."""
    _, _, table = PAGE.read_text().partition("## Names that are not here")
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return set(re.findall(r"`([\w.]+)`", " ".join(rows)))


def test_no_name_is_both_here_and_missing() -> None:
    """A name that was added has left the table."""
    here = HERE | {f"Work.{name}" for name in dir(Work)}
    assert not missing_names() & here


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed: no names to compare"
)
def test_every_name_of_torch_is_here_or_explained() -> None:
    """Public names of torch.distributed, of its works and operators; and the places of all parameters."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    functions, members = json.loads(done.stdout.splitlines()[-1])
    missing = missing_names()
    of_backends = {name for name in functions if name.startswith("ProcessGroup")}  # one for each in a build
    unexplained = set(functions) - HERE - missing - of_backends - IMPORTED
    unexplained |= {
        f"Work.{name}" for name in members["Work"] if name[0] != "_" and not hasattr(Work, name)
    } - missing
    operators = {name for name in members["ReduceOp"] if name.isupper()}
    assert not unexplained | {name for name in operators if not hasattr(dist.ReduceOp, name)}
    assert len(operators) > 8
    assert not {name for name in missing if "." not in name} - set(functions), "torch has them no more"
    for name in set(functions) & set(dist.__all__) - OTHER_PARAMETERS:
        theirs, function = functions[name], getattr(dist, name)
        if theirs is not None and inspect.isroutine(function):
            kinds = inspect.signature(function).parameters.values()
            assert [p.name for p in kinds if p.kind is p.POSITIONAL_OR_KEYWORD] == theirs, name
