"""A store of torch for ranks of a session: a file in memory without a name, which ends with the ranks.

torch's rendezvous would listen at a port.  Here the first rank makes the file, and the others open it through
/proc.  There is one for all process groups that a process makes: torch may use a store as long as the process
lives, so that its descriptor must not be closed and given to another file.
"""

from __future__ import annotations

import os
from typing import Any

from torch.distributed import FileStore, PrefixStore

from nbparallel import distributed
from nbparallel.distributed import Group
from nbparallel.errors import CollectiveMismatchError, DeadlockError

_files: dict[tuple[int, int], int] = {}
"""Descriptors by device and inode."""
_made: list[int] = []
"""The descriptor of the file that this process has made, and how many groups it has served."""


def store_of(ranks: tuple[int, ...]) -> Any:
    """Return a store that all of `ranks` share, which call this together; None without such files."""
    if not hasattr(os, "memfd_create"):
        return None
    communicator = distributed.current()
    first = communicator.rank == ranks[0]
    offer = _offer() if first else None
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


def _offer() -> tuple[int, int, int]:
    if not _made:
        _made[:] = [os.memfd_create("nbparallel-torch-store"), 0]
    _made[1] += 1
    return os.getpid(), _made[0], _made[1]


def _open(pid: int, descriptor: int) -> int:
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    status = os.fstat(opened)
    known = _files.setdefault((status.st_dev, status.st_ino), opened)
    if known != opened:
        os.close(opened)
    return known
