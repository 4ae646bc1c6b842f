"""mpi4py as an oracle: a cell's text runs under ``mpiexec``, where our names of operations are MPI's.

`ask_mpi` returns what each rank's last expression is.  The module is the program of each rank as well, and so
imports nothing but numpy and, there, mpi4py: that has an environment of its own, which ``make mpi`` makes.
"""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

HOME = Path(sys.prefix) / "mpich"
MISSING = f"mpi4py is not in {HOME}: `make mpi` puts it there"
LAUNCH_SECONDS = 120.0
"""With more ranks than cores MPI's spin."""
Cell = tuple[str, Mapping[str, Any]]
"""Its text, and names that it uses."""


def installed() -> bool:
    """Return whether there is mpi4py to ask."""
    return (HOME / "bin" / "mpiexec").exists()


def ask_mpi(cells: Sequence[Cell], firsts: Sequence[int]) -> list[list[Any]]:
    """Return what every rank returns of every cell; hosts have the ranks between their `firsts`."""
    with tempfile.TemporaryDirectory(prefix="nbp-mpi-") as folder:
        job, answer = Path(folder) / "job", Path(folder) / "answer"
        job.write_bytes(pickle.dumps((list(cells), list(firsts))))
        words = [f"{HOME}/bin/mpiexec", "-n", str(firsts[-1]), f"{HOME}/bin/python", __file__]
        with subprocess.Popen([*words, str(job), str(answer)], cwd=folder) as process:
            try:
                code = process.wait(LAUNCH_SECONDS)
            except BaseException:
                process.terminate()  # mpiexec ends its ranks; killed, it would leave them
                raise
        assert code == 0, f"mpiexec ended with {code}"
        found: list[list[Any]] = pickle.loads(answer.read_bytes())
        return found


def _names(mpi: Any, firsts: Sequence[int]) -> dict[str, Any]:
    """Return our names, as MPI does what they say."""
    world = mpi.COMM_WORLD
    rank = world.rank
    here = world.Split(sum(rank >= first for first in firsts))
    operators = {"sum": mpi.SUM, "product": mpi.PROD, "max": mpi.MAX, "min": mpi.MIN}

    def all_reduce(x: Any, op: str = "sum", group: Any = None) -> Any:
        comm = here if group else world
        if not isinstance(x, np.ndarray):
            return comm.allreduce(x, operators[op])
        comm.Allreduce(mpi.IN_PLACE, x, operators[op])
        return x

    def reduce(x: Any, dst: int, op: str = "sum") -> Any:
        found = np.empty_like(x) if rank == dst else None
        world.Reduce(x, found, operators[op], dst)
        return found

    def reduce_scatter(parts: Any, op: str = "sum") -> Any:
        found = np.empty_like(parts[rank])
        world.Reduce_scatter(np.concatenate(parts), found, [len(part) for part in parts], operators[op])
        return found

    def broadcast(x: Any, src: int = 0) -> Any:
        found = world.bcast(x if rank == src else None, src)
        if not isinstance(x, np.ndarray):
            return found
        x[...] = found
        return x

    group = SimpleNamespace(size=lambda: here.size)
    return {
        "np": np, "rank": rank, "all_reduce": all_reduce, "reduce": reduce, "reduce_scatter": reduce_scatter,
        "broadcast": broadcast, "barrier": world.Barrier, "all_gather": world.allgather,
        "all_to_all": world.alltoall, "gather": lambda x, dst: world.gather(x, dst),
        "scatter": lambda parts, src: world.scatter(parts, src),
        "dist": SimpleNamespace(host_group=lambda: group),
    }  # fmt: skip


def _run(cell: str, names: dict[str, Any]) -> Any:
    """Run a cell; return its last expression."""
    tree = ast.parse(cell)
    last = tree.body.pop()
    assert isinstance(last, ast.Expr)
    exec(compile(tree, "<cell>", "exec"), names)
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)


def main(job: str, answer: str) -> None:
    """Be one rank."""
    from mpi4py import MPI

    cells, firsts = pickle.loads(Path(job).read_bytes())
    ours = _names(MPI, firsts)
    found = [_run(cell, {**ours, **names}) for cell, names in cells]
    gathered = MPI.COMM_WORLD.gather(found, 0)
    if gathered is not None:
        Path(answer).write_bytes(pickle.dumps([list(each) for each in zip(*gathered, strict=True)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
