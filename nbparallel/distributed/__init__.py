"""Operations between ranks, named as in torch.distributed, for numpy arrays.

The functions here use the communicator of the running session; the engine sets it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbparallel.distributed.communicator import Communicator
from nbparallel.distributed.reduce import ReduceOp

__all__ = [
    "Communicator",
    "ReduceOp",
    "all_reduce",
    "barrier",
    "broadcast",
    "call_with_rank",
    "current",
    "destroy_process_group",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "recv",
    "send",
    "set_current",
    "strict_sync",
]

_current: Communicator | None = None


def set_current(communicator: Communicator | None) -> None:
    """Make `communicator` the one that the functions of this module use."""
    global _current
    _current = communicator


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
            "Session.run, and in a script that `python -m nbparallel run` started"
        )
    return _current


def is_initialized() -> bool:
    """Return whether this process is a rank."""
    return _current is not None


def init_process_group(*_: Any, **__: Any) -> None:
    """Do nothing: a rank of a session is connected already.  Here so that scripts for torch run."""
    current()


def destroy_process_group(group: None = None) -> None:
    """Do nothing: the session ends with its ranks."""


def get_rank() -> int:
    """Return this rank's number."""
    return current().rank


def get_world_size() -> int:
    """Return how many ranks there are."""
    return current().world_size


def call_with_rank(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return ``function(rank, *args)``: what `nbparallel.spawn` calls on every rank."""
    return function(get_rank(), *args)


def send(tensor: Any, dst: int, group: None = None, tag: int = 0, **options: Any) -> None:
    """Send a value to rank `dst`; see `Communicator.send`."""
    (_current or current()).send(tensor, dst, group, tag, **options)


def recv(tensor: Any = None, src: int | None = None, group: None = None, tag: int = 0, **options: Any) -> Any:
    """Receive a value: ``x = recv(src=0)``; see `Communicator.recv`."""
    return (_current or current()).recv(tensor, src, group, tag, **options)


def broadcast(tensor: Any, src: int = 0, group: None = None, async_op: bool = False, **options: Any) -> Any:
    """Give every rank what rank `src` has; see `Communicator.broadcast`."""
    return (_current or current()).broadcast(tensor, src, group, async_op, **options)


def all_reduce(
    tensor: Any, op: str = "sum", group: None = None, async_op: bool = False, *, timeout: float | None = None
) -> Any:
    """Combine the values of all ranks and give every rank the result; see `Communicator.all_reduce`."""
    return (_current or current()).all_reduce(tensor, op, group, async_op, timeout=timeout)


def barrier(group: None = None, async_op: bool = False, *, timeout: float | None = None) -> None:
    """Return when every rank has called it."""
    (_current or current()).barrier(group, async_op, timeout=timeout)


def strict_sync(on: bool = True) -> None:
    """Make every `send` of this rank wait until its message was received, to show latent deadlocks."""
    current().strict_sync(on)
