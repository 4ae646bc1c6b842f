"""Operations between ranks, named as in torch.distributed, for arrays, tensors and any other objects.

In a cell for ranks they are there without an import: ``total = all_reduce(rank)``; ``all_reduce?`` on a rank
describes one.  One collective, from the call to the return::

    all_reduce(x)            api          check the arguments, find the group
      run(x, op)             collectives  find its fingerprint
        write own slot       slots        fingerprint, line; x, or where it lies; arrive += 1; wake sleepers
        wait for all slots   runtime      spin, then sleep: peers that died, deadlocks, time-outs end it
        compare              slots        one word of each peer; if one differs, all fingerprints: raise alike
        choose the route     collectives  if x does not fit into a slot: by what every rank has offered
        combine              collectives  INLINE: all slots; DIRECT: the arrays; COPIED: copies of them
        release              slots        done = number of this collective: no peer's slot is read any more

With ``async_op=True`` a record of copies is written instead (`ProgressEngine`), and whatever this rank waits
for later makes progress with it.  `send` and `recv` use a ring for each pair of ranks
(`point_to_point`).
"""

from __future__ import annotations

import datetime
import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from nbparallel.distributed.api.groups import (
    CartesianGrid,
    is_backend_available,
    is_gloo_available,
    is_mpi_available,
    is_nccl_available,
    is_torchelastic_launched,
    is_ucc_available,
    is_xccl_available,
)
from nbparallel.distributed.api.locks import NamedLock
from nbparallel.distributed.api.operation_base import Timeout
from nbparallel.distributed.api.point_to_point import P2POp
from nbparallel.distributed.arguments import PROC_NULL
from nbparallel.distributed.communicator import OPERATIONS, Communicator
from nbparallel.distributed.group import Group, set_own_rank
from nbparallel.distributed.operators import ReduceOp
from nbparallel.distributed.work import Work
from nbparallel.errors import misspelt

if TYPE_CHECKING:
    from nbparallel.distributed.bootstrap.process_group import ProcessGroup

__all__ = [
    "ANY_SOURCE",
    "PROC_NULL",
    "CartesianGrid",
    "Communicator",
    "Group",
    "NamedLock",
    "P2POp",
    "ReduceOp",
    "Work",
    "call_with_rank",
    "current",
    "destroy_process_group",
    "get_node_local_rank",
    "init_process_group",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "set_current",
]
__all__.extend(OPERATIONS)

ANY_SOURCE: None = None
"""Source of a `recv` that takes a message of any rank, as if `src` were left out."""
_F = TypeVar("_F", bound=Callable[..., Any])
_current: Communicator | None = None  # what the functions here use; the engine sets it
_group: ProcessGroup | None = None
"""The world that this process has joined by itself; on a rank of a session None."""


def set_current(communicator: Communicator | None) -> None:
    """Make `communicator` the one that the functions of this module use."""
    global _current
    _current = communicator
    set_own_rank(-1 if communicator is None else communicator.rank)


def current() -> Communicator:
    """Return the communicator of this rank.

    Raises
    ------
    RuntimeError
        This process is no rank.
    """
    if _current is None:
        raise RuntimeError(
            "this process is no rank of a session: operations between ranks work in a %%parallel cell, in "
            "Session.run, in a script that `python -m nbparallel run` started, and after init_process_group()"
        )
    return _current


def is_available() -> bool:
    """Return True: there is nothing that could have been left out, as there is in builds of torch."""
    return True


def is_initialized() -> bool:
    """Return whether this process is a rank."""
    return _current is not None


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return this rank's number on its machine: all ranks are on one.

    A process that is no rank yet has what its launcher has set as LOCAL_RANK, else `fallback_rank`.

    Raises
    ------
    RuntimeError
        It has neither.
    """
    if _current is not None:
        return _current.rank
    found = os.environ.get("LOCAL_RANK", fallback_rank)
    if found is None:
        raise RuntimeError("this process is no rank, and LOCAL_RANK is not set: pass a fallback_rank")
    return int(found)


def is_session_rank() -> bool:
    """Return whether this process is a rank that a session has started."""
    return _current is not None and _group is None and not _current.forked


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: float | datetime.timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: None = None,
    group_name: str = "",
    pg_options: object = None,
    device_id: object = None,
) -> None:
    """Join processes that another program, or `nbparallel.multiprocessing`, started here, as ranks.

    All of them must call it, each with its own rank.  It returns when all have.  On a rank of a session, and
    in a script that ``python -m nbparallel run`` started, it does nothing: they are connected already.

    Parameters
    ----------
    backend : str, optional
        There is one; torch's names are taken for it.
    init_method : str, optional
        Where they meet.  ``"env://"``, the default: the environment variable MASTER_PORT, a number
        that no other world of this user uses while it is being put together.  ``"file:///path"``: at a path
        that does not exist yet.
    timeout : float or timedelta, optional
        Seconds to wait for the others, by default 300.  Operations have their own ``timeout=``.
    world_size, rank : int, optional
        By default the environment variables WORLD_SIZE and RANK.
    store : None
        There is none to be passed; this and what follows is here so that scripts for torch run.

    Raises
    ------
    ValueError, TypeError
        Something is missing or makes no sense, MASTER_ADDR is another machine, or this process has joined a
        world already.
    RendezvousError
        The processes do not fit together (a rank joined twice, world sizes or versions differ), one of them
        ended before all had joined, or they cannot meet there.
    CollectiveTimeoutError
        The call timed out; the message names the ranks that did not join.
    StartError
        The system lacks what is needed.

    Notes
    -----
    Names and defaults are those of ``torch.distributed``.  No process is killed: each exits by
    itself.  If one dies, the others' operations raise `PeerFailedError`.  Arrays that were shared before are
    shared in the world as well, and stay what they are after it.

    Examples
    --------
    >>> import nbparallel.distributed as dist  # doctest: +SKIP
    >>> dist.init_process_group()  # RANK=0 WORLD_SIZE=2 MASTER_PORT=29500 python script.py
    >>> dist.all_reduce(dist.get_rank())
    1
    """
    global _group
    if is_session_rank():
        return
    if _group is not None and _group.is_ours:  # else that of the process from which this one was forked
        raise ValueError(
            "this process is a rank of a world already: call destroy_process_group() before it joins another"
        )
    from nbparallel.distributed.bootstrap import process_group
    from nbparallel.distributed.bootstrap.process_group import check_backend, resolve_init_method, seconds_of

    if store is not None:
        raise ValueError("store cannot be passed: init_method names the place where the ranks meet")
    check_backend(backend)
    seconds = seconds_of(timeout)
    method = resolve_init_method(init_method, rank, world_size, os.environ)
    _group = process_group.join(method, seconds, sys._getframe(1))
    set_current(_group.communicator)


def destroy_process_group(group: object = None) -> None:
    """Leave the world that `init_process_group` joined; does nothing if there is none, and for a `group`.

    What this rank has sent can still be received.  An operation for which another rank waits for this one
    raises there, so call it when all work is done; at the exit of the process it is called by itself.
    A session's rank stays in its session.
    """
    global _group
    if group is not None or _group is None or not _group.is_ours:
        return
    leaving, _group = _group, None
    set_current(None)
    leaving.leave()


def call_with_rank(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return ``function(rank, *args)``: what `nbparallel.spawn` calls on every rank."""
    return function(current().rank, *args)


def _as(name: str) -> Callable[[_F], _F]:
    """Give a function of this module the description of a method of the communicator."""
    method = getattr(Communicator, name)
    signature = inspect.signature(method)
    _, *parameters = signature.parameters.values()  # all but self

    def describe(function: _F) -> _F:
        described: Any = functools.wraps(method)(function)
        described.__signature__ = signature.replace(parameters=parameters)
        described.__module__ = __name__
        described.__qualname__ = method.__qualname__ = name  # Python's errors about arguments show it
        return function

    return describe


if not TYPE_CHECKING:  # a type checker would take every name for one of this module

    def __getattr__(name: str) -> Any:
        raise misspelt(name, "nbparallel.distributed", __all__)


def __dir__() -> list[str]:
    dunders = (name for name in globals() if name.startswith("__"))
    return sorted({*dunders, *__all__})


def _operation(name: str) -> Callable[..., Any]:
    """Return the function of this module for a method of the communicator."""

    @_as(name)
    def call(*args: Any, **options: Any) -> Any:
        return getattr(_current or current(), name)(*args, **options)

    return call


# Spelled out, because the way through `_operation` takes longer than some of what they do, and so do `*` and
# `**` in a call; users see the descriptions of the methods.


@_as("send")
def send(
    tensor: Any,
    dst: int | None = None,
    group: Group | None = None,
    tag: int = 0,
    *more: Any,
    **options: Any,
) -> None:
    """Send a value to rank `dst`."""
    if more or options:
        (_current or current()).send(tensor, dst, group, tag, *more, **options)
    else:
        (_current or current()).send(tensor, dst, group, tag)


@_as("recv")
def recv(
    tensor: Any = None,
    src: int | None = None,
    group: Group | None = None,
    tag: int = 0,
    *more: Any,
    **options: Any,
) -> Any:
    """Receive a value: ``x = recv(src=0)``."""
    if more or options:
        return (_current or current()).recv(tensor, src, group, tag, *more, **options)
    return (_current or current()).recv(tensor, src, group, tag)


if not TYPE_CHECKING:  # which value comes back depends on what is passed: overloads of the methods say it

    @_as("broadcast")
    def broadcast(
        tensor: Any,
        src: int | None = None,
        group: Group | None = None,
        async_op: bool = False,
        *more: Any,
        **options: Any,
    ) -> Any:
        """Give every rank what rank `src` has."""
        if more or options:
            return (_current or current()).broadcast(tensor, src, group, async_op, *more, **options)
        return (_current or current()).broadcast(tensor, src, group, async_op)

    @_as("all_reduce")
    def all_reduce(
        tensor: Any, op: str = "sum", group: Group | None = None, async_op: bool = False, **options: Any
    ) -> Any:
        """Combine the values of all ranks and give every rank the result."""
        if options:
            return (_current or current()).all_reduce(tensor, op, group, async_op, **options)
        return (_current or current()).all_reduce(tensor, op, group, async_op)

    @_as("barrier")
    def barrier(group: Group | None = None, async_op: bool = False, *more: Any, **options: Any) -> Any:
        """Return when every rank has called it."""
        if more or options:
            return (_current or current()).barrier(group, async_op, *more, **options)
        return (_current or current()).barrier(group, async_op)


@_as("lock")
def lock(name: str = "", timeout: Timeout = None) -> NamedLock:
    """Return the lock of this name; it is kept beyond the epoch, so it looks for the communicator itself."""
    return NamedLock(name, timeout, lambda: (_current or current()).locks)


globals().update({name: _operation(name) for name in OPERATIONS if name not in globals()})

if TYPE_CHECKING:  # one line for each, so that type checkers and editors know them; a test compares
    _typed = current()
    all_gather: Final = _typed.all_gather
    all_gather_coalesced: Final = _typed.all_gather_coalesced
    all_gather_into_tensor: Final = _typed.all_gather_into_tensor
    all_gather_object: Final = _typed.all_gather_object
    all_gather_single: Final = _typed.all_gather_single
    all_reduce: Final = _typed.all_reduce
    all_reduce_coalesced: Final = _typed.all_reduce_coalesced
    all_to_all: Final = _typed.all_to_all
    all_to_all_single: Final = _typed.all_to_all_single
    assert_same: Final = _typed.assert_same
    average_gradients: Final = _typed.average_gradients
    barrier: Final = _typed.barrier
    batch_isend_irecv: Final = _typed.batch_isend_irecv
    batches: Final = _typed.batches
    broadcast: Final = _typed.broadcast
    broadcast_object_list: Final = _typed.broadcast_object_list
    exscan: Final = _typed.exscan
    gather: Final = _typed.gather
    gather_object: Final = _typed.gather_object
    get_backend: Final = _typed.get_backend
    get_global_rank: Final = _typed.get_global_rank
    get_group_rank: Final = _typed.get_group_rank
    get_process_group_ranks: Final = _typed.get_process_group_ranks
    get_rank: Final = _typed.get_rank
    get_world_size: Final = _typed.get_world_size
    grid: Final = _typed.grid
    host_group: Final = _typed.host_group
    irecv: Final = _typed.irecv
    isend: Final = _typed.isend
    local_slice: Final = _typed.local_slice
    maxloc: Final = _typed.maxloc
    minloc: Final = _typed.minloc
    monitored_barrier: Final = _typed.monitored_barrier
    new_group: Final = _typed.new_group
    new_subgroups: Final = _typed.new_subgroups
    new_subgroups_by_enumeration: Final = _typed.new_subgroups_by_enumeration
    recv_object_list: Final = _typed.recv_object_list
    reduce: Final = _typed.reduce
    reduce_scatter: Final = _typed.reduce_scatter
    reduce_scatter_single: Final = _typed.reduce_scatter_single
    reduce_scatter_tensor: Final = _typed.reduce_scatter_tensor
    scan: Final = _typed.scan
    scatter: Final = _typed.scatter
    scatter_object_list: Final = _typed.scatter_object_list
    send_object_list: Final = _typed.send_object_list
    sendrecv: Final = _typed.sendrecv
    shard: Final = _typed.shard
    split: Final = _typed.split
    strict_sync: Final = _typed.strict_sync
