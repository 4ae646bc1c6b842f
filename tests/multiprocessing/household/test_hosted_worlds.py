"""`init_process_group` in processes of `nbparallel.multiprocessing`: their supervisor hosts the world."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.harness.kernel import Kernel
from tests.multiprocessing.programs import run_program
from tests.sharing.tensors.optional import needs_torch

START = """
import nbparallel.distributed as dist
from nbparallel.multiprocessing import household

def start(function, *args, nprocs=2, **options):
    return mp.start_processes(function, args, nprocs, start_method={method!r}, **options)

def join(rank, size, **options):
    dist.init_process_group("gloo", f"file://{folder}/place", rank=rank, world_size=size, **options)

def caught(*args, **options):
    try:
        start(*args, **options)
    except mp.ProcessException as error:
        return error
    raise AssertionError("nothing was raised")

def nothing_is_left():
    for _ in range(1000):
        report = household.report()
        rows = [row for row in report.segments if row.messages or row.holders != (0,)]  # but the root's own
        if not rows and not report.processes:
            return True
        time.sleep(0.01)
    raise AssertionError(report)
"""


def run(body: str, folder: Path, method: str, limit: float = 60) -> str:
    """Run a script that has these functions."""
    head = START.format(method=method, folder=folder)
    return run_program(head + textwrap.dedent(body), folder, method, limit=limit)


def test_operations_and_arrays_of_the_household(tmp_path: Path, method: str) -> None:
    """Operations work in one world after another; arrays of before are the same memory in and after them."""
    run(
        """
        def work(rank, x, queue):
            for _ in range(2):
                join(rank, 2)
                assert dist.all_reduce(np.full(100_000, rank + 1.0))[-1] == 3
                if rank == 0:
                    dist.send(np.arange(200_000.0), 1)
                    queue.put(np.ones(100_000))
                else:
                    assert dist.recv(src=0)[-1] == 199_999
                    assert queue.get()[-1] == 1
                x[rank] += 1
                dist.destroy_process_group()
                assert not dist.is_initialized()
            x[rank] += 1

        x = nbp.zeros(2)
        start(work, x, ctx.Queue())
        assert x.tolist() == [3, 3], x
        del x
        assert nothing_is_left()
        assert os.listdir(".") == ["script.py"]
        """,
        tmp_path,
        method,
    )


@pytest.mark.slow
def test_what_was_sent_outlives_its_sender(tmp_path: Path) -> None:
    """A rank that left, by the call or by its function's end, and ended: what it sent is received."""
    run(
        """
        def work(rank, calls, gone):
            join(rank, 2)
            if rank == 0:
                dist.send(np.arange(200_000.0), 1)
                if calls:
                    dist.destroy_process_group()
            else:
                gone.wait()
                assert dist.recv(src=0)[-1] == 199_999

        for calls in (True, False):
            gone = ctx.Event()
            context = start(work, calls, gone, join=False)
            context.processes[0].join()
            gone.set()
            while not context.join():
                pass
            assert nothing_is_left()
        """,
        tmp_path,
        "forkserver",
    )


@pytest.mark.slow
def test_a_rank_that_fails(tmp_path: Path, method: str) -> None:
    """`join` raises what failed first, and not what a rank raised that waited for that one."""
    said = run(
        """
        from multiprocessing.util import Finalize

        def work(rank, how):
            join(rank, 2)
            if rank == 1:
                if how == "raises":
                    Finalize(None, time.sleep, (30,), exitpriority=-5)  # rank 0 ends first
                    raise KeyError("oh")
                os.kill(os.getpid(), signal.SIGKILL) if how == "killed" else os._exit(3)
            try:
                dist.barrier()
            except PeerFailedError as error:
                os.write(1, f"{error}\\n".encode())
                raise

        error = caught(work, "raises")
        assert error.error_index == 1 and isinstance(error.__cause__, KeyError), error
        error = caught(work, "killed")
        assert (error.error_index, error.signal_name) == (1, "SIGKILL"), error
        assert caught(work, "exits").exit_code == 3
        assert nothing_is_left()
        """,
        tmp_path,
        method,
    )
    assert "rank 1 failed: KeyError" in said


@pytest.mark.slow
def test_how_a_rank_died_is_told(tmp_path: Path) -> None:
    """The rank that waits has the exit code or signal of the one that died."""
    run(
        """
        def work(rank, size, texts, how):
            join(rank, size)
            if rank == 1:
                os._exit(3) if how == "exit" else os.kill(os.getpid(), signal.SIGKILL)
            try:
                dist.barrier()
            except NbParallelError as error:
                texts.put(str(error))

        texts = ctx.Queue()
        for how, expected in (("exit", "exit code 3"), ("kill", "SIGKILL")):
            processes = [ctx.Process(target=work, args=(rank, 2, texts, how)) for rank in range(2)]
            for process in processes:
                process.start()
            text = texts.get(timeout=30)
            assert "rank 1" in text and expected in text, text
            for process in processes:
                process.join()
        """,
        tmp_path,
        "forkserver",
    )


@pytest.mark.slow
def test_worlds_that_cannot_be_formed(tmp_path: Path) -> None:
    """Missing ranks, a rank twice, other sizes, one that ends: typed errors; the next world is formed."""
    run(
        """
        def work(index, ranks, sizes, seconds, ends):
            if index == ends:
                join(ranks[index], sizes[index], timeout=0.1)
            join(ranks[index], sizes[index], timeout=seconds)

        def cause(ranks, sizes=(2, 2), seconds=60, ends=None):
            error = caught(work, ranks, sizes, seconds, ends, nprocs=len(ranks))
            return type(error.__cause__), str(error.__cause__)

        kind, text = cause((0, 2), (3, 3), 0.2)
        assert kind is CollectiveTimeoutError and "rank 1, which did not join" in text, text
        assert "nbparallel.multiprocessing" in text
        kind, text = cause((1, 1))
        assert kind is RendezvousError and "rank 1 joined twice" in text, text
        kind, text = cause((0, 1), (2, 3))
        assert kind is RendezvousError and "the world sizes differ" in text, text
        assert start(work, (0, 1), (2, 2), 60, None) is None

        def leaves(index):
            if index == 1:
                signal.alarm(1)  # it is killed while it waits
            join(index, 3, timeout=60)

        error = caught(leaves)
        assert (error.error_index, error.signal_name) == (1, "SIGALRM") or (
            isinstance(error.__cause__, RendezvousError) and "left or ended before rank 2" in str(error)
        ), error
        try:
            dist.init_process_group(init_method="file:///tmp/x", rank=0, world_size=1)
        except RuntimeError as error:
            assert "this one cannot" in str(error), error
        else:
            raise AssertionError("the root is no rank")
        """,
        tmp_path,
        "forkserver",
    )


@pytest.mark.slow
def test_processes_of_ranks(tmp_path: Path) -> None:
    """Processes that a session's rank started, or a member of a script's world, form worlds, too."""
    run(
        """
        def inner(index, size, x, number):
            place = f"file:///{folder}/inner{number}"
            dist.init_process_group(init_method=place, rank=index, world_size=size)
            x[index] = dist.all_reduce(index + 1)
            dist.destroy_process_group()

        def outer(number):
            for method in ("fork", "forkserver"):
                x = nbp.zeros(2)
                mp.start_processes(inner, (2, x, number), 2, start_method=method)
                assert x.tolist() == [3, 3], x
            assert dist.all_reduce(1) == 2

        folder = os.getcwd()
        nbp.spawn(outer, args=(), nprocs=2)
        """,
        tmp_path,
        "forkserver",
    )
    script = tmp_path / "member.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import nbparallel as nbp, nbparallel.distributed as dist, nbparallel.multiprocessing as mp
            def inner(index, x):
                dist.init_process_group(init_method="file://{tmp_path}/inner", rank=index, world_size=2)
                x[index] = dist.all_reduce(index + 1)
            dist.init_process_group(init_method="file://{tmp_path}/outer", rank=0, world_size=1)
            for method in ("fork", "forkserver", "spawn"):
                x = nbp.zeros(2)
                mp.start_processes(inner, (x,), 2, start_method=method)
                assert x.tolist() == [3, 3], x
            dist.destroy_process_group()
            """
        )
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_functions_of_cells(kernel: Kernel, tmp_path: Path) -> None:
    """The tutorials' function is of a cell, takes MASTER_PORT, and runs in processes beside a session."""
    cell = """
import os
import numpy as np
import nbparallel as nbp, nbparallel.distributed as dist, nbparallel.multiprocessing as mp
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "29500"
total = nbp.zeros(2)
def work(rank, size):
    dist.init_process_group("gloo", rank=rank, world_size=size)
    total[rank] = dist.all_reduce(rank + 1)
    dist.destroy_process_group()
for method in ("spawn", "fork", "forkserver"):
    total[:] = 0
    mp.start_processes(work, (2,), 2, start_method=method)
    assert total.tolist() == [3, 3], total
with nbp.Session(2) as session:
    assert session.run("all_reduce(1)", namespace={}).values[0] == 2
    mp.start_processes(work, (2,), 2, start_method="forkserver")
print("done")
"""
    outcome = kernel.run(cell)
    assert (outcome.stdout, outcome.stderr) == ("done\n", "")


@needs_torch
@pytest.mark.slow
@pytest.mark.time_limit(160)  # five processes import torch, some seconds each beside others
def test_torchs_init_process_group(tmp_path: Path, method: str) -> None:
    """torch.distributed with the backend nbparallel, and with gloo, as its tutorials write it."""
    run(
        """
        import torch
        import torch.distributed as td
        from nbparallel.torch_backend.registration import register
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"

        def work(rank, backend, x):
            torch.set_num_threads(1)
            register()  # as torch's entry point does where the package is installed
            place = f"file://{os.getcwd()}/torch-{backend}"
            td.init_process_group(backend, init_method=place, rank=rank, world_size=2)
            t = torch.full((3,), rank + 1.0)
            td.all_reduce(t)
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
            model(torch.ones(3, 4) * rank).sum().backward()
            x[rank] = t
            td.barrier()
            td.destroy_process_group()

        for backend in ("nbparallel", "gloo"):
            x = torch.zeros(2, 3).share_memory_()
            start(work, backend, x)
            assert x.tolist() == [[3.0] * 3] * 2, x
        """,
        tmp_path,
        method,
        limit=150,
    )
