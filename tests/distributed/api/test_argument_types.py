"""Arguments of a wrong type, every parameter of every operation: an error that names it, and nothing sent."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest

import nbparallel.distributed as dist
from nbparallel.distributed import Communicator, P2POp

Arguments = dict[str, Any]
NAN = float("nan")
NO_INT = [1.5, "0", b"0", [0], {0: 0}, True, np.ones(2), np.array(0), 1j, object()]
NUMBER = [*NO_INT, -1, 10**30]
ARRAY = [None, 1, "x", [1.0], {"x": 1}, object(), np.ma.masked_array([1.0]), np.array([None])]
COMPARED = [*ARRAY[:1], *ARRAY[2:], 1j, np.ones(2, complex)]
LOCATIONS = ["0", 1.5, [0], True, 1j, object(), 10**30, 2**63, np.ones(4), np.zeros(3, int)]
OUTPUTS = [1, "xy", {0: 1}, object(), np.ones(4), [1, 2], [np.ones(4)], [None, None]]
OBJECTS = [1, "xy", {0: 1}, (1, 2), object(), np.ones(2), [1], []]
VALUES = [1, "xy", b"xy", {1, 2}, {0: 1}, object(), np.array(1.0), [1], (1, 2, 3)]
WRONG: dict[str, list[Any]] = {
    "op": [None, 1, ["sum"], {"sum": 1}, {"sum"}, np.ones(2), np.array("sum"), b"sum", object(), "summ", ""],
    "tag": NUMBER,
    "timeout": ["1", [1], {1: 1}, True, 1j, object(), np.ones(2), NAN, -1, -float("inf")],
    "group": [0, "all", [0, 1], {0: 1}, True, object(), np.ones(2)],
    "rank": NUMBER,
    "split sizes": [1, "11", [1.0, 3.0], ["1", "3"], [True, 3], {1: 3}, object(), np.ones(2), [1], [5, -1]],
}
"""What is wrong for a parameter wherever it stands; the other lists are named in `TABLE`."""
ROOTS = {"src", "dst", "group_src", "group_dst", "global_rank", "group_rank"}
FLAGS = {
    "view", "async_op", "return_source", "wait_all_ranks", "shuffle", "drop_last", "on", "device_ids",
    "device", "use_batch", "backend", "pg_options", "group_desc",
}  # fmt: skip
"""Taken by their truth, as everywhere in Python; or torch's, and not looked at."""
ANYTHING = {
    ("send", "tensor"), ("isend", "tensor"), ("sendrecv", "tensor"), ("broadcast", "tensor"),
    ("gather", "tensor"),
    ("all_gather", "tensor"), ("all_gather_object", "obj"), ("gather_object", "obj"), ("assert_same", "x"),
    ("new_subgroups", "timeout"), ("new_subgroups_by_enumeration", "timeout"),
}  # fmt: skip
"""Every value is right here, or is compared with what the other ranks pass."""
OTHERS = {"current", "set_current", "is_available", "is_initialized", "call_with_rank", "strict_sync"} | {
    "init_process_group", "destroy_process_group", "get_node_local_rank", "is_torchelastic_launched",
    *(f"is_{name}_available" for name in ("backend", "gloo", "mpi", "nccl", "ucc", "xccl")),
}  # fmt: skip
"""No operations; `test_init_process_group` looks at those that join processes."""


def table(me: int) -> dict[str, tuple[Arguments, dict[str, list[Any]]]]:
    """Return for every operation right arguments, with this rank as a root, and wrong ones of its own."""
    x = np.ones(4)
    pair = [np.ones(4), np.ones(4)]
    left = [np.ones(2), np.ones(2)]
    return {
        "send": ({"tensor": 1, "dst": me}, {}),
        "recv": ({"src": me}, {"tensor": [v for v in ARRAY if v is not None]}),
        "isend": ({"tensor": 1, "dst": me}, {}),
        "irecv": ({"src": me}, {"tensor": [v for v in ARRAY if v is not None]}),
        "sendrecv": (
            {"tensor": 1, "dst": me, "src": me},
            {"output": [v for v in ARRAY if v is not None], "recv_tag": NUMBER},
        ),
        "batch_isend_irecv": (
            {"p2p_op_list": [P2POp(dist.isend, 1, me)]},
            {"p2p_op_list": [None, 1, "x", {}, object(), [1], iter([]), np.ones(2)]},
        ),
        "send_object_list": ({"object_list": [1], "dst": me}, {"object_list": OBJECTS[:-2]}),
        "recv_object_list": ({"object_list": [1], "src": me}, {"object_list": OBJECTS[:-2]}),
        "broadcast": ({"tensor": x, "src": me}, {}),
        "all_reduce": ({"tensor": x}, {"tensor": ARRAY[:1] + ARRAY[2:]}),
        "all_reduce_coalesced": ({"tensors": [x]}, {"tensors": [1, "x", None, {0: x}, object(), x]}),
        "all_gather_coalesced": (
            {"output_tensor_lists": [pair[:1], pair[1:]], "input_tensor_list": [x]},
            {
                "output_tensor_lists": [1, "xy", None, {0: x}, object(), x, [x, x], [1, 1], [[], []]],
                "input_tensor_list": [1, "xy", None, {0: x}, object(), x, []],
            },
        ),
        "barrier": ({}, {}),
        "monitored_barrier": ({}, {}),
        "scan": ({"tensor": x}, {"tensor": ARRAY[:1] + ARRAY[2:]}),
        "exscan": ({"tensor": x}, {"tensor": ARRAY[:1] + ARRAY[2:]}),
        "maxloc": ({"tensor": x}, {"tensor": COMPARED, "location": LOCATIONS}),
        "minloc": ({"tensor": x}, {"tensor": COMPARED, "location": LOCATIONS}),
        "lock": ({"name": "x"}, {"name": [None, 1, b"x", ["x"], object(), ""]}),
        "grid": (
            {"dims": 2},
            {
                "dims": ["x", b"x", 1.5, None, {2: 1}, object(), True, [True, 2], [1.5], [], 3, -2, [0, 3]],
                "periodic": [None, 1, "x", [1], {True: 1}, object(), [True, False], []],
            },
        ),
        "reduce": ({"tensor": x, "dst": 0}, {"tensor": ARRAY[:1] + ARRAY[2:]}),
        "reduce_scatter": (
            {"tensor": np.ones(2), "input_list": left},
            {"tensor": ARRAY, "input_list": VALUES + ARRAY[-1:], "output": ARRAY},
        ),
        "reduce_scatter_tensor": (
            {"output": np.ones(2), "input": x},
            {"output": ARRAY, "input": [*ARRAY[:-2], np.ones(3)]},
        ),
        "gather": ({"tensor": x, "gather_list": None, "dst": me}, {"gather_list": OUTPUTS}),
        "all_gather": ({"tensor_list": pair, "tensor": x}, {"tensor_list": OUTPUTS}),
        "scatter": (
            {"tensor": x, "scatter_list": pair, "src": me},
            {"tensor": ARRAY[1:], "scatter_list": VALUES},
        ),
        "all_to_all": (
            {"output_tensor_list": pair, "input_tensor_list": pair},
            {"output_tensor_list": OUTPUTS, "input_tensor_list": VALUES},
        ),
        "all_gather_into_tensor": (
            {"output_tensor": np.ones(8), "input_tensor": x},
            {"output_tensor": ARRAY, "input_tensor": ARRAY[:-2]},
        ),
        "all_to_all_single": (
            {"output": x, "input": np.ones(4)},
            {
                "output": ARRAY,
                "input": ARRAY[:-2],
                "output_split_sizes": WRONG["split sizes"],
                "input_split_sizes": WRONG["split sizes"],
            },
        ),
        "all_gather_object": ({"object_list": [1, 2], "obj": 1}, {"object_list": OBJECTS}),
        "gather_object": (
            {"obj": 1, "object_gather_list": [1, 2], "dst": me},
            {"object_gather_list": [None, *OBJECTS]},
        ),
        "broadcast_object_list": ({"object_list": [1], "src": me}, {"object_list": OBJECTS[:-2]}),
        "scatter_object_list": (
            {"scatter_object_output_list": [1], "scatter_object_input_list": [1, 2], "src": me},
            {
                "scatter_object_output_list": [None, *OBJECTS[:-2], []],
                "scatter_object_input_list": [None, *OBJECTS],
            },
        ),
        "assert_same": ({"x": 1}, {}),
        "average_gradients": (
            {"arrays": [x]},
            {
                "arrays": [1, "x", None, object(), [1.0], {"w": None}, ["x"], [np.ones(2, int)], [x, x]],
                "weight": ["1", [1], {1: 1}, 1j, object(), np.ones(2), NAN, -1],
                "bucket_nbytes": [*NO_INT, -1, 0, None],
            },
        ),
        "local_slice": ({"n": 3}, {"n": [*NO_INT, -1, None]}),
        "shard": ({"x": x}, {"x": [1, "x", b"x", None, {1: 1}, {1}, object(), np.array(1)]}),
        "batches": (
            {"batch_size": 1, "epoch": 0},
            {
                "arrays": ARRAY[:-2],
                "batch_size": [*NO_INT, -1, 0, None],
                "epoch": [*NO_INT, -1, None],
                "seed": [*NO_INT, -1, None],
            },
        ),
        "new_group": (
            {"ranks": [0]},
            {
                "ranks": [1, "x", True, object(), np.array(0), [0.5], ["0"], [True], [[0]], [0, 0], [2], []],
                "tag": [1, None, b"x", ["x"], object()],
            },
        ),
        "new_subgroups": ({}, {"group_size": [*NO_INT, 0, -1, 3]}),
        "new_subgroups_by_enumeration": (
            {"ranks_per_subgroup_list": [[0], [1]]},
            {"ranks_per_subgroup_list": [1, "x", None, {0: 1}, object(), [[0, 0]], [[]], [[0, 1], [1]]]},
        ),
        "host_group": ({}, {}),
        "get_backend": ({}, {}),
        "split": ({"color": 0}, {"color": NO_INT, "key": NO_INT}),
        "get_rank": ({}, {}),
        "get_world_size": ({}, {}),
        "get_process_group_ranks": ({}, {}),
        "get_group_rank": ({"group": None, "global_rank": 0}, {"global_rank": [*NUMBER, None]}),
        "get_global_rank": ({"group": None, "group_rank": 0}, {"group_rank": [*NUMBER, None]}),
    }  # fmt: skip


def parameters(operation: str) -> list[str]:
    """Return the parameters that have a type: neither flags nor what takes anything."""
    found = inspect.signature(getattr(Communicator, operation)).parameters.values()
    return [
        p.name
        for p in found
        if p.name != "self"
        and p.kind is not p.VAR_KEYWORD
        and p.name not in FLAGS
        and (operation, p.name) not in ANYTHING
    ]


def cases(operation: str, me: int) -> Iterator[tuple[str, Any, list[Any], Arguments]]:
    """Yield every wrong value of every parameter, and the arguments of a call with it."""
    right, own = table(me)[operation]
    for name in parameters(operation):
        wrong = own.get(name) or WRONG["rank" if name in ROOTS else name]
        for value in wrong:
            arguments = {**right, name: value}
            if name.startswith("group_"):
                arguments.pop(name.removeprefix("group_"), None)  # either of both says which rank
            if operation == "batches":
                yield name, value, [arguments.pop("arrays", np.ones(4))], arguments
            else:
                yield name, value, [], arguments


@functools.cache
def raises(path: str) -> frozenset[int]:
    """Return the lines of a file that belong to a `raise`."""
    tree = ast.parse(Path(path).read_text())
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Raise)]
    return frozenset(line for n in found for line in range(n.lineno, (n.end_lineno or n.lineno) + 1))


def is_meant(traceback: TracebackType | None) -> bool:
    """Whether the error was raised by a `raise` of the package, not by Python or numpy inside it."""
    assert traceback is not None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    path = traceback.tb_frame.f_code.co_filename
    return "nbparallel/" in path and traceback.tb_lineno in raises(path)


def complaint(call: Callable[..., Any], name: str, positional: list[Any], arguments: Arguments) -> str:
    """Return what is wrong about the error of a call; empty if nothing is."""
    try:
        call(*positional, **arguments)
    except (TypeError, ValueError) as error:
        text = str(error)
        if not is_meant(error.__traceback__):
            return f"{type(error).__name__} of Python itself: {text}"
        named = [name, name.removeprefix("group_"), call.__name__.removeprefix("i")]
        named += ["split sizes", "this array", "a group"]
        return "" if any(word in text for word in named) else f"which argument? {text}"
    except Exception as error:  # noqa: BLE001 - any other one is wrong here
        return repr(error)
    return "accepted"


def test_the_table_is_complete() -> None:
    """Every public operation stands in the table, and every parameter has wrong values."""
    functions = {n for n in dist.__all__ if inspect.isroutine(getattr(dist, n))} - OTHERS
    aliases = {"all_gather_single", "reduce_scatter_single"}
    assert functions - aliases == set(table(0))
    for operation in table(0):
        for name in parameters(operation):
            own = table(0)[operation][1]
            assert name in own or name in WRONG or name in ROOTS, (operation, name)


@pytest.mark.fault("F33")
def test_wrong_types_are_named(ranks: Any) -> None:
    """Each raises the package's own TypeError or ValueError on the caller, and the next operation works."""

    def work(c: Communicator) -> list[str]:
        found, count = [], 0
        for operation in table(c.rank):
            for name, value, positional, arguments in cases(operation, c.rank):
                said = complaint(getattr(dist, operation), name, positional, arguments)
                count += 1
                if said:
                    found.append(f"{operation}({name}={value!r}): {said}")
        assert count > 500
        return found or [str(x) for x in c.all_gather(c.rank)]

    for said in ranks(2, work):
        assert said == ["0", "1"], "\n".join(said)
