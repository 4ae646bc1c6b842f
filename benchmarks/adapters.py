"""nbparallel and torch's gloo, in the same processes, as `lines` wants them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from nbparallel.distributed import Communicator
from tests.harness.ranks import context_of

Call = Callable[[], Any]


class Ours:
    """nbparallel, on arrays that all lie in shared memory, or on none that do."""

    def __init__(self, c: Communicator, *, shared: bool) -> None:
        self._c, self._shared = c, shared
        self.rank, self.size = c.rank, c.world_size

    def array(self, shape: tuple[int, ...], dtype: type) -> Any:
        """Return an array, its pages touched."""
        if not self._shared:
            return np.zeros(shape, dtype)
        return context_of(self._c).store.zeros(shape, dtype)

    def agree(self, value: float) -> float:
        """Return the largest value of all ranks."""
        return float(self._c.all_reduce(value, "max"))

    def barrier(self) -> Call:
        """Return the operation."""
        return self._c.barrier

    def all_reduce(self, x: Any) -> Call:
        """Return the operation."""
        return lambda: self._c.all_reduce(x)

    def broadcast(self, x: Any) -> Call:
        """Return the operation."""
        return lambda: self._c.broadcast(x, 0)

    def gather(self, out: Any, x: Any) -> Call:
        """Return the operation."""
        rows = list(out) if self.rank == 0 else None
        return lambda: self._c.gather(x, rows, 0)

    def scatter(self, out: Any, x: Any) -> Call:
        """Return the operation."""
        rows = list(x) if self.rank == 0 else None
        return lambda: self._c.scatter(out, rows, 0)

    def all_to_all(self, out: Any, x: Any) -> Call:
        """Return the operation."""
        return lambda: self._c.all_to_all_single(out, x)

    def reduce_scatter(self, out: Any, x: Any) -> Call:
        """Return the operation."""
        return lambda: self._c.reduce_scatter_tensor(out, x)

    def send(self, x: Any) -> Call:
        """Return the operation."""
        if self.rank == 0:
            return lambda: self._c.send(x, 1)
        return lambda: self._c.recv(x, src=0)

    def ping_pong(self, x: Any) -> Call:
        """Return the operation."""
        c, other = self._c, 1 - self.rank
        if self.rank == 0:
            return lambda: (c.send(x, other), c.recv(x, src=other))
        return lambda: (c.recv(x, src=other), c.send(x, other))

    def view(self, operation: str, x: Any) -> Call | None:
        """Return the form that copies nothing; None for private arrays."""
        c = self._c
        if not self._shared:
            return None
        if operation == "all_gather":
            return lambda: c.all_gather(x, view=True)
        if operation == "all_to_all":
            return lambda: c.all_to_all(x, view=True)
        if operation == "broadcast":
            return lambda: c.broadcast(x if c.rank == 0 else None, 0, view=True)
        if self.rank == 0:
            return lambda: c.send(x, 1, view=True)
        return (lambda: c.recv(src=0)) if self.rank == 1 else lambda: None


class Gloo:
    """torch.distributed over gloo, on the loopback device with one thread: its best on one machine."""

    def __init__(self, rank: int, world_size: int, folder: str) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=world_size)
        self._torch, self._dist = torch, dist
        self.rank, self.size = rank, world_size

    def array(self, shape: tuple[int, ...], dtype: type) -> Any:
        """Return a tensor's memory as an array."""
        return self._torch.zeros(shape, dtype=getattr(self._torch, np.dtype(dtype).name)).numpy()

    def agree(self, value: float) -> float:
        """Return the largest value of all ranks."""
        tensor = self._torch.tensor([value])
        self._dist.all_reduce(tensor, self._dist.ReduceOp.MAX)
        return float(tensor)

    def barrier(self) -> Call:
        """Return the operation."""
        return self._dist.barrier

    def all_reduce(self, x: Any) -> Call:
        """Return the operation."""
        tensor = self._torch.from_numpy(x)
        return lambda: self._dist.all_reduce(tensor)

    def broadcast(self, x: Any) -> Call:
        """Return the operation."""
        tensor = self._torch.from_numpy(x)
        return lambda: self._dist.broadcast(tensor, 0)

    def gather(self, out: Any, x: Any) -> Call:
        """Return the operation."""
        tensor = self._torch.from_numpy(x)
        rows = list(self._torch.from_numpy(out)) if self.rank == 0 else None
        return lambda: self._dist.gather(tensor, rows, 0)

    def scatter(self, out: Any, x: Any) -> Call:
        """Return the operation."""
        tensor = self._torch.from_numpy(out)
        rows = list(self._torch.from_numpy(x)) if self.rank == 0 else None
        return lambda: self._dist.scatter(tensor, rows, 0)

    def all_to_all(self, out: Any, x: Any) -> Call:
        """Return the operation."""
        target, source = self._torch.from_numpy(out), self._torch.from_numpy(x)
        return lambda: self._dist.all_to_all_single(target, source)

    def reduce_scatter(self, out: Any, x: Any) -> Call:
        """Return the operation."""
        target, source = self._torch.from_numpy(out), self._torch.from_numpy(x.reshape(-1))
        name = "reduce_scatter_single"  # its name since torch 2.13
        operation = getattr(self._dist, name, None) or self._dist.reduce_scatter_tensor
        return lambda: operation(target, source)

    def send(self, x: Any) -> Call:
        """Return the operation."""
        tensor = self._torch.from_numpy(x)
        if self.rank == 0:
            return lambda: self._dist.send(tensor, 1)
        return lambda: self._dist.recv(tensor, 0)

    def ping_pong(self, x: Any) -> Call:
        """Return the operation."""
        dist, other, tensor = self._dist, 1 - self.rank, self._torch.from_numpy(x)
        if self.rank == 0:
            return lambda: (dist.send(tensor, other), dist.recv(tensor, other))
        return lambda: (dist.recv(tensor, other), dist.send(tensor, other))

    def view(self, operation: str, x: Any) -> None:
        """Return None: everything is copied."""
