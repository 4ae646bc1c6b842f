"""Effects of the operations between ranks: what each orders, and which of its arguments it reads or fills.

The guarantee of torch and MPI on purpose, not what ours happen to do: ``broadcast`` orders nothing but the
root before the others, although its ranks meet here (docs/reference/operations.md, "What orders").
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Order(enum.Enum):
    """Which ranks' past a collective puts before which ranks' future."""

    ALL = enum.auto()
    """All before, all after."""
    FROM_ROOT = enum.auto()
    """The root's before the others'."""
    TO_ROOT = enum.auto()
    """The others' before the root's."""
    PREFIX = enum.auto()
    """Each rank's before those of higher rank."""


class Effect(NamedTuple):
    """What a collective does.

    Attributes
    ----------
    reads, fills : tuple of str
        Parameters; nested lists, tuples and dicts count with all arrays in them.
    output_first : bool
        With both, the first of `reads` is filled from the second; alone, it is read.
    """

    order: Order
    reads: tuple[str, ...] = ()
    fills: tuple[str, ...] = ()
    output_first: bool = False


_ALL, _FROM, _TO = Order.ALL, Order.FROM_ROOT, Order.TO_ROOT
COLLECTIVES: dict[str, Effect] = {
    "all_reduce": Effect(_ALL, ("tensor",), ("tensor",)),
    "all_reduce_coalesced": Effect(_ALL, ("tensors",), ("tensors",)),
    "reduce": Effect(_TO, ("tensor",), ("tensor",)),
    "reduce_scatter": Effect(_ALL, ("tensor", "input_list"), ("output",), output_first=True),
    "reduce_scatter_tensor": Effect(_ALL, ("input",), ("output",)),
    "reduce_scatter_single": Effect(_ALL, ("input",), ("output",)),
    "scan": Effect(Order.PREFIX, ("tensor",), ("tensor",)),
    "exscan": Effect(Order.PREFIX, ("tensor",), ("tensor",)),
    "maxloc": Effect(_ALL, ("tensor", "location")),
    "minloc": Effect(_ALL, ("tensor", "location")),
    "broadcast": Effect(_FROM, ("tensor",), ("tensor",)),
    "scatter": Effect(_FROM, ("tensor", "scatter_list"), output_first=True),
    "gather": Effect(_TO, ("tensor",), ("gather_list",)),
    "all_gather": Effect(_ALL, ("tensor_list", "tensor"), output_first=True),
    "all_gather_coalesced": Effect(_ALL, ("input_tensor_list",), ("output_tensor_lists",)),
    "all_gather_into_tensor": Effect(_ALL, ("input_tensor",), ("output_tensor",)),
    "all_gather_single": Effect(_ALL, ("input_tensor",), ("output_tensor",)),
    "all_to_all": Effect(_ALL, ("output_tensor_list", "input_tensor_list"), output_first=True),
    "all_to_all_single": Effect(_ALL, ("input",), ("output",)),
    "all_gather_object": Effect(_ALL, ("obj",)),
    "gather_object": Effect(_TO, ("obj",)),
    "broadcast_object_list": Effect(_FROM, ("object_list",)),
    "scatter_object_list": Effect(_FROM, ("scatter_object_input_list",)),
    "average_gradients": Effect(_ALL, ("arrays",), ("arrays",)),
    "assert_same": Effect(_ALL, ("x",)),
}
"""Collectives by the names of the communicator's methods; any other orders all, and touches no array."""

UNORDERED = (
    "batches", "get_backend", "get_global_rank", "get_group_rank", "get_process_group_ranks", "get_rank",
    "get_world_size", "grid", "host_group", "local_slice", "lock", "new_group", "new_subgroups",
    "new_subgroups_by_enumeration", "shard", "split", "strict_sync",
)  # fmt: skip
"""Those that order nothing, and read no array, or one of which they return a view."""
