"""Scripts that torch's own launchers start use the backend by its name, without importing nbparallel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nbparallel.testing.waiting import wait_until

TRAIN = """\
import datetime, os, time
import torch
import torch.distributed as dist

dist.init_process_group("nbparallel")
rank, size = dist.get_rank(), dist.get_world_size()
x = torch.full((3,), float(rank + 1))
dist.all_reduce(x)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
model(torch.ones(3, 4) * rank).sum().backward()
objects = [None] * size
dist.all_gather_object(objects, ("from", rank))
dist.monitored_barrier()
dist.destroy_process_group()
if rank == 0:
    # the other one finds in torchrun's store where they met before, which only its wait shows: where this
    # pause is too short, it finds the new place at its first look, and nothing fails
    time.sleep(0.3)
dist.init_process_group("nbparallel", timeout=datetime.timedelta(seconds=30))  # as often as the script likes
dist.barrier()
os.write(1, f"{rank} of {size}: {x.tolist()} {objects} {dist.get_backend()}\\n".encode())
dist.destroy_process_group()
"""
SPAWN = """\
import os, socket, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def main(rank, size, port):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(port)
    dist.init_process_group("nbparallel", rank=rank, world_size=size)
    x = torch.full((3,), float(rank + 1))
    dist.all_reduce(x)
    if "fail" in sys.argv and rank == 1:
        os._exit(7)
    try:
        dist.barrier()
    except RuntimeError as error:
        os.write(1, f"{type(error).__name__} of 2: {error}\\n".encode())
        raise
    os.write(1, f"{rank} of {size}: {x.tolist()}\\n".encode())
    dist.destroy_process_group()

if __name__ == "__main__":
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        port = sock.getsockname()[1]
    mp.spawn(main, (2, port), 2)
"""


def run(command: list[str], entry_point: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with torch's entry point of this checkout."""
    path = os.pathsep.join([os.environ["PYTHONPATH"], entry_point])
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=180
    )


def said(text: str) -> list[str]:
    """Return the lines of ranks, sorted."""
    return sorted(line for line in text.splitlines() if " of " in line)


@pytest.mark.slow
def test_torchrun(tmp_path: Path, entry_point: str) -> None:
    """Under torchrun the ranks meet through torch's store; nothing is left where they met."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = run(launcher, entry_point, meeting)
    assert done.returncode == 0, done.stderr
    objects = [("from", 0), ("from", 1)]
    assert said(done.stdout) == [f"{rank} of 2: [3.0, 3.0, 3.0] {objects} nbparallel" for rank in range(2)]
    assert not list(meeting.glob("nbparallel-*"))


@pytest.mark.slow
def test_spawn_of_torch(tmp_path: Path, entry_point: str) -> None:
    """The same under torch.multiprocessing.spawn; a rank that dies is named, as a RuntimeError."""
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    done = run([str(script)], entry_point, tmp_path)
    assert done.returncode == 0, done.stderr
    assert said(done.stdout) == [f"{rank} of 2: [3.0, 3.0, 3.0]" for rank in range(2)]
    failed = run([str(script), "fail"], entry_point, tmp_path)
    assert failed.returncode != 0
    assert not said(failed.stdout) or "rank 1" in said(failed.stdout)[0], failed.stdout
    wait_until(lambda: not list(tmp_path.glob("nbparallel-*")))


@pytest.mark.slow
def test_importing_torch_loads_next_to_nothing(tmp_path: Path, entry_point: str) -> None:
    """The entry point makes a name known; operations and the backend's classes are not loaded."""
    code = """
import sys
import torch
loaded = {name for name in sys.modules if name.startswith("nbparallel")}
allowed = {"nbparallel", "nbparallel.errors", "nbparallel.errors.text", "nbparallel.errors.text.escaping"}
allowed |= {"nbparallel.torch_backend", "nbparallel.torch_backend.registration"}
assert loaded <= allowed, loaded - allowed
assert "nbparallel" in torch.distributed.Backend.backend_list
assert torch.distributed.Backend.default_device_backend_map["cpu"] == "gloo"
"""
    done = run(["-c", code], entry_point, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_process_group_loads_what_operations_need(tmp_path: Path, entry_point: str) -> None:
    """Not what sessions, notebooks or hosts need; and the heap of torch is not looked through for it."""
    code = f"""
import gc, sys
import torch.distributed as dist
started = []
gc.callbacks.append(lambda phase, info: started.append(info["generation"]) if phase == "start" else None)
dist.init_process_group("nbparallel", init_method="file://{tmp_path / "meet"}", rank=0, world_size=1)
loaded = {{name for name in sys.modules if name.startswith("nbparallel.")}}
far = "session engine cluster multiprocessing distributed.races wire.inspection wire.messages".split()
assert not [name for name in loaded for other in far if name.startswith(f"nbparallel.{{other}}")], loaded
assert len(loaded) <= 180, len(loaded)
assert 2 not in started and gc.isenabled(), started
dist.destroy_process_group()
"""
    done = run(["-c", code], entry_point, tmp_path)
    assert done.returncode == 0, done.stderr
