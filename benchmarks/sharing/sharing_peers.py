"""Peers that hand arrays to four processes: torch, multiprocessing.shared_memory, joblib, Ray.

Each keeps four workers that wait, at its best fair setting, and offers ``total(n, value)``: make an array of
`n` floats, all `value`, let every worker read all of it, and return what each of them summed.  What was made
is freed by ``drop()``, which is not timed.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import time
from multiprocessing.shared_memory import SharedMemory
from typing import Any, Protocol

import numpy as np

from benchmarks.report import installed

WORKERS = 4
ANSWER_SECONDS = 120.0
"""A queue of a dead worker would be waited for without an end."""


class Peer(Protocol):
    """Four workers that can be handed an array."""

    name: str
    """How the table calls it."""
    seconds: float | None
    """What the last `total` took, if it was timed inside; None: the caller times it."""

    def total(self, n: int, value: float) -> list[float]:
        """Return what each worker summed."""
        ...

    def drop(self) -> None:
        """Free the last array, here and there."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...


def peers(stack: contextlib.ExitStack) -> tuple[list[Peer], list[str]]:
    """Start every peer that is installed; `stack` ends them.  Also return what is not."""
    started: list[Peer] = []
    missing = []
    for name, make in (("torch", _torches), ("joblib", Joblib), ("ray", Ray)):
        if not installed(name):
            missing.append(name)
            continue
        made: Any = make()
        started += made if isinstance(made, list) else [made]
    started.append(StandardLibrary())
    for peer in started:
        stack.callback(peer.close)
    return started, missing


# multiprocessing.shared_memory ------------------------------------------------------------------------


def _read_shared_memory(pipe: Any) -> None:
    while (said := pipe.recv()) is not None:
        name, n = said
        memory = SharedMemory(name)
        array = np.ndarray(n, float, memory.buf)
        pipe.send(float(array.sum()))
        del array
        memory.close()


class StandardLibrary:
    """`multiprocessing.shared_memory` with a pipe to each worker; the array is filled where it lies."""

    name = "`multiprocessing.shared_memory`"
    seconds = None

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self._memory: SharedMemory | None = None
        self._pipes, self._workers = [], []
        for _ in range(WORKERS):
            mine, theirs = context.Pipe()
            worker = context.Process(target=_read_shared_memory, args=(theirs,), daemon=True)
            worker.start()
            theirs.close()
            self._pipes.append(mine)
            self._workers.append(worker)

    def total(self, n: int, value: float) -> list[float]:
        """As `Peer.total`."""
        self._memory = SharedMemory(create=True, size=n * 8)
        array = np.ndarray(n, float, self._memory.buf)
        array[:] = value
        del array
        for pipe in self._pipes:
            pipe.send((self._memory.name, n))
        return [pipe.recv() for pipe in self._pipes]

    def drop(self) -> None:
        """As `Peer.drop`."""
        if self._memory is not None:
            self._memory.close()
            self._memory.unlink()
            self._memory = None

    def close(self) -> None:
        """As `Peer.close`."""
        self.drop()
        for pipe in self._pipes:
            pipe.send(None)
            pipe.close()
        for worker in self._workers:
            worker.join(10)


# torch ------------------------------------------------------------------------------------------------


def _read_tensors(tasks: Any, answers: Any, strategy: str) -> None:
    import torch
    import torch.multiprocessing as tmp

    torch.set_num_threads(1)
    tmp.set_sharing_strategy(strategy)
    answers.send(0)
    while (said := tasks.get()) is not None:
        if isinstance(said, list):
            answers.send((sum(float(tensor[0]) for tensor in said), len(os.listdir("/proc/self/fd"))))
        else:
            answers.send(float(said.sum()))
        del said


class Torch:
    """`torch.multiprocessing` with a queue and a pipe for each worker, in one of its strategies.

    A large tensor is filled in shared memory, as its own DataLoader does it (``UntypedStorage._new_shared``).
    """

    seconds = None

    def __init__(self, strategy: str) -> None:
        import torch.multiprocessing as tmp

        self._mp, self.strategy = tmp, strategy
        self.name = f"torch queue, `{strategy}`"
        context = tmp.get_context("spawn")
        self._tasks = [context.SimpleQueue() for _ in range(WORKERS)]
        pipes = [context.Pipe(duplex=False) for _ in range(WORKERS)]
        self._answers = [reader for reader, _ in pipes]
        self._workers = [
            context.Process(target=_read_tensors, args=(tasks, answers, strategy), daemon=True)
            for tasks, (_, answers) in zip(self._tasks, pipes, strict=True)
        ]
        for worker in self._workers:
            worker.start()
        for answers in self._answers:
            answers.recv()
        self._kept: Any = None

    def hand_over(self, what: Any) -> list[Any]:
        """Give something to every worker; return the answers."""
        self._mp.set_sharing_strategy(self.strategy)
        self._kept = what
        for tasks in self._tasks:
            tasks.put(what)
        return [self._answer(number) for number in range(WORKERS)]

    def _answer(self, number: int) -> Any:
        limit = time.monotonic() + ANSWER_SECONDS
        while not self._answers[number].poll(0.2):
            if not self._workers[number].is_alive() or time.monotonic() > limit:
                raise RuntimeError("a worker died, or did not answer")
        return self._answers[number].recv()

    def total(self, n: int, value: float) -> list[float]:
        """As `Peer.total`."""
        import torch

        self._mp.set_sharing_strategy(self.strategy)
        storage = torch.UntypedStorage._new_shared(n * 8)
        tensor = torch.empty(0, dtype=torch.float64).set_(storage)
        tensor.fill_(value)
        return self.hand_over(tensor)

    def drop(self) -> None:
        """As `Peer.drop`."""
        self._kept = None

    def close(self) -> None:
        """As `Peer.close`."""
        self.drop()
        for tasks in self._tasks:
            tasks.put(None)
        for worker in self._workers:
            worker.join(10)


def _torches() -> list[Torch]:
    import torch

    torch.set_num_threads(1)
    return [Torch("file_descriptor"), Torch("file_system")]


# joblib, Ray ------------------------------------------------------------------------------------------


def _sum(array: Any) -> float:
    return float(array.sum())


class Joblib:
    """`joblib.Parallel` over loky: from 1 MB on, arrays go through files in /dev/shm, its own choice."""

    name = "joblib memmapping"
    seconds = None

    def __init__(self) -> None:
        import joblib

        self._joblib = joblib
        self._parallel = joblib.Parallel(WORKERS, batch_size=1, mmap_mode="r")
        self._parallel.__enter__()
        self.total(1, 0.0)

    def total(self, n: int, value: float) -> list[float]:
        """As `Peer.total`."""
        array = np.full(n, value)
        return list(self._parallel(self._joblib.delayed(_sum)(array) for _ in range(WORKERS)))

    def drop(self) -> None:
        """Files go when joblib notices that no process uses them."""

    def close(self) -> None:
        """As `Peer.close`."""
        from joblib.externals.loky import get_reusable_executor

        self._parallel.__exit__(None, None, None)
        get_reusable_executor().shutdown(wait=True)


class Ray:
    """`ray.put`, then four actors that read it."""

    name = "Ray"
    seconds = None

    def __init__(self) -> None:
        import ray

        self._ray = ray
        ray.init(num_cpus=WORKERS, include_dashboard=False, logging_level="error")
        actor = ray.remote(_RayReader)
        self._actors = [actor.remote() for _ in range(WORKERS)]
        self._kept: Any = None

    def total(self, n: int, value: float) -> list[float]:
        """As `Peer.total`."""
        self._kept = self._ray.put(np.full(n, value))
        return list(self._ray.get([actor.total.remote(self._kept) for actor in self._actors]))

    def drop(self) -> None:
        """As `Peer.drop`."""
        self._kept = None

    def close(self) -> None:
        """As `Peer.close`."""
        self.drop()
        self._ray.shutdown()


class _RayReader:
    def total(self, array: Any) -> float:
        return float(array.sum())
