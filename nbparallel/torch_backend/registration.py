"""The entry point that torch calls when it is imported: the name of the backend, and no more.

What does the work is imported with the first process group.  On a rank of a session, `nbparallel` is also the
backend of ``init_process_group()`` without arguments, and the ranks meet without a port.

What is replaced in torch.distributed, because torch leaves no other way.

Everywhere: `monitored_barrier`, which refuses all backends but gloo.  On the ranks of a session only:

* the default backend of CPU tensors, which is ours;
* `init_process_group`, because a cell may run again: a second call destroys what the first has made;
* the rendezvous of ``env://``: ranks of one cell meet through it, and need no port;
* `destroy_process_group`, because a group of gloo must not be freed while its threads are busy;
* the reducer of DistributedDataParallel, which cannot go on after a backward pass that has failed.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

NAME = "nbparallel"
_NO_BACKEND = ("Distributed package doesn't have", "Unknown backend type")
"""How torch's messages begin about a backend that it lacks, such as nccl where it was built for CPUs."""
_WHAT_RUNS_HERE = (
    "In a cell, init_process_group() without a backend, or with 'nbparallel' or 'gloo', takes tensors on the "
    "CPU"
)
Handler = Callable[..., Iterator[tuple[Any, int, int]]]


def replace_everywhere(distributed: Any) -> None:
    """Make `monitored_barrier` of torch take groups of ours."""
    c10d = distributed.distributed_c10d
    original = c10d.monitored_barrier

    @functools.wraps(original)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        from nbparallel.torch_backend.backend_group import BackendGroup

        mine = c10d._get_default_group() if group is None else group
        if isinstance(mine, BackendGroup):
            mine.monitored_barrier(timeout, wait_all_ranks)
        else:
            original(group, timeout, wait_all_ranks)

    c10d.monitored_barrier = distributed.monitored_barrier = monitored_barrier


def replace_on_session_rank(distributed: Any) -> None:
    """Make `init_process_group` work in a cell, with any backend, as often as it is called."""
    c10d = distributed.distributed_c10d
    handlers = distributed.rendezvous.__globals__["_rendezvous_handlers"]
    distributed.Backend.default_device_backend_map["cpu"] = NAME
    handlers["env"] = _meeting(handlers["env"])
    _retire_groups(distributed)
    original = c10d.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **options: Any) -> None:
        if c10d.is_initialized():
            c10d.destroy_process_group()
        c10d._world.group_count = (
            0  # one that failed may have counted, and ranks would name groups differently
        )
        try:
            original(NAME if backend is None else backend, *args, **options)
        except (RuntimeError, AssertionError) as error:
            if str(error).startswith(_NO_BACKEND):
                error.args = (f"{error}{'' if str(error).endswith('.') else '.'} {_WHAT_RUNS_HERE}",)
            raise

    c10d.init_process_group = distributed.init_process_group = init_process_group
    distributed.device_mesh.init_process_group = init_process_group  # it calls this by a name of its own
    reducer = distributed.Reducer

    def make_reducer(*args: Any, **options: Any) -> Any:
        from nbparallel.torch_backend.backend_group import ResumableReducer

        return ResumableReducer(*args, **options)

    distributed.Reducer = functools.wraps(reducer, updated=())(make_reducer)


def _meeting(original: Handler) -> Handler:
    """Return the handler of ``env://`` for ranks of a session; others' worlds meet as torch does it."""

    @functools.wraps(original)
    def meet(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
        from nbparallel.torch_backend.membership import may_meet_elsewhere, misplaced, ranks_of, store_of

        asked = dict(parse_qsl(urlsplit(url).query))
        rank = int(asked.get("rank", os.environ["RANK"]))
        size = int(asked.get("world_size", os.environ["WORLD_SIZE"]))
        ranks = ranks_of(rank, size)
        if not ranks and not may_meet_elsewhere(rank, size):
            raise misplaced(rank, size)
        store = store_of(ranks) if ranks else None
        if store is None:
            yield from original(url, **options)
            return
        yield store, rank, size

    return meet


def _retire_groups(distributed: Any) -> None:
    """Keep groups of other backends that were destroyed until some are destroyed the next time.

    Freeing a group of gloo joins its threads with the interpreter's lock held.  One of them may need that
    lock to free what it has just reduced, and then both wait forever: seen with torch 2.13 without this
    library, where a model of DDP was freed right after its group was destroyed.
    """
    c10d = distributed.distributed_c10d
    original, retired = c10d.destroy_process_group, list[Any]()

    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        before = [each for each, (backend, _) in c10d._world.pg_map.items() if backend != NAME]
        original(group)
        destroyed = [each for each in before if each not in c10d._world.pg_map]
        if destroyed:
            retired[:] = destroyed

    c10d.destroy_process_group = distributed.destroy_process_group = destroy_process_group


def register() -> None:
    """Give torch.distributed the backend ``nbparallel``; whatever happens, ``import torch`` goes on."""
    try:
        _register()
    except Exception as error:  # noqa: BLE001  torch would not be importable
        warnings.warn(f"torch.distributed has no backend nbparallel: {error!r}", RuntimeWarning, stacklevel=2)


def _register() -> None:
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is None or not torch_distributed.is_available():
        return
    backend = torch_distributed.Backend
    if NAME in backend.backend_list:
        return
    backend.register_backend(NAME, _make_group, extended_api=True, devices=["cpu"])
    # torch 2.15 attaches its flight recorder to what does not record by itself; groups of Python refuse it
    recording: set[str] = getattr(torch_distributed.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add(NAME)
    replace_everywhere(torch_distributed)
    ours = sys.modules.get("nbparallel.distributed")
    if ours is not None and ours.is_session_rank():
        replace_on_session_rank(torch_distributed)


def _make_group(options: Any, backend_options: object = None) -> Any:
    collecting = gc.isenabled()
    gc.disable()  # what is imported stays; to look through all of torch for it takes a third of the time
    try:
        from nbparallel.torch_backend.membership import make_group
    finally:
        if collecting:
            gc.enable()
    return make_group(options, backend_options)
