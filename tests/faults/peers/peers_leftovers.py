"""What a peer leaves behind when its owner, or owner and janitor, are killed; run in places of its own.

Prints one JSON object: peer and kill point -> files left in /dev/shm, in bytes.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys

from nbparallel.testing.waiting import wait_until

OWN = """
import sys, time
import numpy as np, nbparallel as nbp
x = nbp.share(np.ones(1 << 17), strategy="file_system")
session = nbp.Session(1)
session.run("x.sum(); y = nbp.share(x + 1, strategy='file_system')", namespace={"x": x})
janitor = session.statistics().supervisor_pid
print(janitor, session.statistics().ranks[0].pid, flush=True)
time.sleep(1000)
"""
STDLIB = """
import time
from multiprocessing import resource_tracker, shared_memory
x = shared_memory.SharedMemory(create=True, size=1 << 20)
print(resource_tracker._resource_tracker._pid, flush=True)
time.sleep(1000)
"""
TORCH = """
import os, time
import torch, torch.multiprocessing as mp
mp.set_sharing_strategy("file_system")
x = torch.ones(1 << 18).share_memory_()
parents = {}
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        with open(f"/proc/{pid}/comm") as file:
            name = file.read()
        with open(f"/proc/{pid}/environ") as file:
            mine = f"NBP_PEER={os.environ['NBP_PEER']}\\0" in file.read() + "\\0"
    except OSError:
        continue
    if name.startswith("torch_shm") and mine:
        print(pid, flush=True)
time.sleep(1000)
"""
PEERS = {"nbparallel": OWN, "multiprocessing.shared_memory": STDLIB, "torch.multiprocessing": TORCH}
SETTLE_SECONDS = 20.0
"""A generous bound; torch's manager waits two seconds before it removes anything."""


def left():
    """Return the files in /dev/shm and their bytes."""
    return {name: os.stat(f"/dev/shm/{name}").st_size for name in os.listdir("/dev/shm")}


def belongs(pid, trial):
    """Tell whether a process bears the mark of a trial: not before it has begun its program."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"NBP_PEER={trial}".encode() in file.read().split(b"\0")
    except OSError:
        return False  # it ended meanwhile


def anybody(trial):
    """Tell whether a process that a trial started, directly or not, still runs."""
    return any(belongs(pid, trial) for pid in filter(str.isdigit, os.listdir("/proc")))


def settled(before, trial=None):
    """Return what is new in /dev/shm once that is nothing, or nobody of a trial is left who cleans up."""
    new = {}

    def is_settled():
        nonlocal new
        for_good = trial is not None and not anybody(trial)  # asked before the look
        new = {name: size for name, size in left().items() if name not in before}
        return not new or for_good

    with contextlib.suppress(AssertionError):
        wait_until(is_settled, seconds=SETTLE_SECONDS)
    return new


def trial(source, point):
    """Start a peer, kill it, return what it left."""
    before = left()
    name = f"{os.getpid()}-{point}"
    environment = {**os.environ, "NBP_PEER": name}
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", source],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as owner:
        helpers = [int(word) for word in owner.stdout.readline().split()]
        assert helpers, "no janitor was found"
        # else it would be taken for gone
        wait_until(lambda: all(belongs(pid, name) for pid in helpers), "a supervisor does not begin")
        victims = [owner.pid, *helpers] if point == "owner and janitor" else [owner.pid]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in victims:
                os.kill(pid, number)
        owner.wait()
        return settled(before, name)


def main():
    """Try every peer that was asked for at both kill points."""
    found = {}
    for peer in sys.argv[1:]:
        for point in ("owner", "owner and janitor"):
            found[f"{peer}, {point}"] = trial(PEERS[peer], point)
            if peer == "nbparallel":
                import nbparallel as nbp

                with nbp.Session(1) as session:
                    session.run("rank")
                found[f"{peer}, {point}, after the next session"] = settled({})
            for name in left():
                os.unlink(f"/dev/shm/{name}")  # what peers leave is cleaned up here
    print(json.dumps(found))


if __name__ == "__main__":
    main()
