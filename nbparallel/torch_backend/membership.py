"""Which of our ranks a process group of torch consists of, and how processes of a script meet."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from functools import cache
from itertools import count
from typing import Any

import torch.distributed
from torch.distributed import FileStore, PrefixStore

from nbparallel import distributed
from nbparallel.distributed import Group
from nbparallel.errors import CollectiveMismatchError, CollectiveTimeoutError, DeadlockError
from nbparallel.torch_backend.backend_group import BackendGroup, seconds_of

_PLACE = "nbparallel"
"""The key under which rank 0 publishes where to meet."""

_HERE = ("localhost", "127.0.0.1", "::1", "0.0.0.0")
_PAUSE_SECONDS = 0.01
_worlds: dict[tuple[tuple[int, ...], int], BackendGroup] = {}
"""The world of this rank's last cells, by its ranks and their number: the same object when a cell runs again.

Functions of torch.distributed.nn have the world of their import as a default.
"""
_met_in: set[str] = set()
"""Where this process has met others before: torchrun keeps one store, with rank 0's earlier answers."""


def make_group(options: Any, _backend_options: object = None) -> BackendGroup:
    """Return a process group; what torch calls for each group of the backend.

    Raises
    ------
    ValueError
        The group is none of ranks of this cell.
    NbParallelError
        The processes of a script could not meet.
    """
    name, index, size = options.group_id, options.group_rank, options.group_size
    members = tuple(options.global_ranks_in_group)
    timeout = seconds_of(options.timeout)
    if members:
        first = torch.distributed.distributed_c10d._get_default_group()
        if isinstance(first, BackendGroup):  # else gloo or another backend made it: all ranks, in order
            members = tuple([first.ranks[member] for member in members])
        return BackendGroup(members, index, name=name, first=False, timeout=timeout)
    leave = None if distributed.is_initialized() else distributed.destroy_process_group
    if leave is not None:
        _meet(options.store, index, size, options.timeout)
    ranks = ranks_of(index, size)
    if not ranks:
        raise misplaced(index, size)
    place = ranks, distributed.current().world_size
    world = None if leave else _worlds.get(place)
    if world is None:
        _worlds.clear()
        world = BackendGroup(ranks, index, name=name, first=True, timeout=timeout, leave=leave)
        _worlds[place] = world
    world.timeout = timeout
    return world


def misplaced(index: int, size: int) -> ValueError:
    """Return the error of a call with a rank and a world size that do not fit the cell."""
    mine = distributed.current()
    return ValueError(
        f"init_process_group was called with rank={index} and world_size={size} on rank {mine.rank} of "
        f"{mine.world_size}, in a cell of {len(mine.cell_ranks)} ranks: leave both out, or pass "
        "rank=rank, world_size=world_size"
    )


def may_meet_elsewhere(index: int, size: int) -> bool:
    """Return whether a world that is none of `ranks_of` can be formed: some ranks, or other machines.

    torch would wait for the missing ones in C++ code, for half an hour and where no interrupt ends it.
    """
    if os.environ.get("MASTER_ADDR", "localhost") not in _HERE:
        return True
    return 0 <= index < size < distributed.current().world_size


def ranks_of(index: int, size: int) -> tuple[int, ...]:
    """Return our ranks that are the `size` ranks of torch's world, of which this is number `index`.

    That are all, those of the cell, or this one alone; empty if none of them fits.
    """
    communicator = distributed.current()
    for ranks in (tuple(range(communicator.world_size)), communicator.cell_ranks, (communicator.rank,)):
        if len(ranks) == size and 0 <= index < size and ranks[index] == communicator.rank:
            return ranks
    return ()


def _meet(store: Any, rank: int, size: int, timeout: Any) -> None:
    """Join the world of the processes that share a store of torch."""
    if rank == 0:
        name = f"nbparallel-{os.geteuid()}-torch-{secrets.token_hex(8)}"
        place = os.path.join(tempfile.gettempdir(), name)
        store.set(_PLACE, f"{_machine()}\n{place}")
    else:
        machine, place = _new_place(store, rank, timeout.total_seconds())
        if machine != _machine():
            raise ValueError(
                f"rank 0 runs on another machine or in another container than rank {rank}: the ranks of the "
                "backend nbparallel share memory; use gloo between machines"
            )
    _met_in.add(place)
    distributed.init_process_group(init_method=f"file://{place}", rank=rank, world_size=size, timeout=timeout)


def _new_place(store: Any, rank: int, seconds: float) -> tuple[str, str]:
    """Return rank 0's machine and where it waits now, which is no place of an earlier world."""
    deadline = time.monotonic() + seconds
    while True:
        machine, place = store.get(_PLACE).decode().split("\n", 1)
        if place not in _met_in:
            return machine, place
        if time.monotonic() > deadline:
            raise CollectiveTimeoutError(
                f"rank {rank} has waited {seconds:g} s in init_process_group(), which rank 0 has not called "
                "again since destroy_process_group()"
            )
        time.sleep(_PAUSE_SECONDS)


def _machine() -> str:
    """Return what is the same for all processes that can share memory."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot} {os.stat('/dev/shm').st_dev}"
    except OSError:  # not Linux
        return os.uname().nodename


# A store of torch for ranks of a session: a file in memory without a name, which ends with the ranks.
#
# torch's rendezvous would listen at a port.  Here the first rank makes the file, and the others open it
# through /proc.  There is one for all process groups that a process makes: torch may use a store as long as
# the process lives, so that its descriptor must not be closed and given to another file.

_files: dict[tuple[int, int], int] = {}
"""Descriptors by device and inode."""
_numbers = count(1)
"""Of the groups that this process's own file serves."""


def store_of(ranks: tuple[int, ...]) -> Any:
    """Return a store that all of `ranks` share, which call this together; None without such files."""
    if not hasattr(os, "memfd_create"):
        return None
    communicator = distributed.current()
    first = communicator.rank == ranks[0]
    offer = (os.getpid(), _own_file(), next(_numbers)) if first else None
    if len(ranks) > 1:
        group = None if len(ranks) == communicator.world_size else Group(ranks)
        try:
            offer = communicator.broadcast(offer, ranks[0], group)
        except (CollectiveMismatchError, DeadlockError) as error:
            raise type(error)(
                f"init_process_group() begins with a broadcast between all ranks, and {error}"
            ) from None
    assert offer is not None, "the first rank has offered its file"
    pid, descriptor, number = offer
    mine = descriptor if first else _open(pid, descriptor)
    return PrefixStore(str(number), FileStore(f"/proc/self/fd/{mine}", len(ranks)))


@cache
def _own_file() -> int:
    return os.memfd_create("nbparallel-torch-store")


def _open(pid: int, descriptor: int) -> int:
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    status = os.fstat(opened)
    known = _files.setdefault((status.st_dev, status.st_ino), opened)
    if known != opened:
        os.close(opened)
    return known
