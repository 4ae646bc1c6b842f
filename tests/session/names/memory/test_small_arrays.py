"""Ten thousand small arrays on four ranks cost a handful of descriptors and mappings, anywhere."""

import json
import subprocess
import sys

import pytest

STRATEGIES = ["file_descriptor", "file_system", "file_region", "mmap"]
COUNT = 10_000
SCRIPT = """
import json, os, resource, sys, time
strategy = sys.argv[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
import numpy as np
import nbparallel as nbp

COST = '''
import os
def cost(pid="self"):
    maps = open(f"/proc/{pid}/maps").read().splitlines()
    return len(os.listdir(f"/proc/{pid}/fd")), sum("nbp" in line for line in maps)
'''
exec(COST)
nbp.set_sharing_strategy(strategy)
with nbp.Session(4) as session:
    session.run(COST)
    writable = [nbp.full(100, i) for i in range(COUNT // 2)]
    names = {f"x{i}": np.full(100, float(i)) for i in range(COUNT - COUNT // 2)}
    cell = "\\n".join(",".join(f"x{i}" for i in range(k, k + 100)) for k in range(0, len(names), 100))
    session.push(writable=writable)
    cell += "\\nwritable[rank][1] = -1 - rank\\ntotal = sum(float(x[0]) for x in writable)"
    cell += "\\ntotal + sum(float(globals()[f'x{i}'][0]) for i in range(COUNT - COUNT // 2))"
    started = time.perf_counter()
    values = list(session.run(cell.replace("COUNT", str(COUNT)), namespace=names).values)
    seconds = time.perf_counter() - started
    ranks = list(session.run("cost()").values)
    costs = {"notebook": cost(), "supervisor": cost(session.statistics().supervisor_pid)}
    costs.update({f"rank {rank}": pair for rank, pair in enumerate(ranks)})
    written = [float(x[1]) for x in writable[:4]]
    del writable
    names.clear()
    session.run("writable = None", namespace=names)
    again = nbp.ones(100)
    session.push(again=again)
    after = list(session.run("float(again.sum())").values)
print(json.dumps([values, costs, written, after, seconds]))
"""


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.time_limit(120)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ten_thousand_arrays_on_four_ranks(strategy):
    """At most 64 descriptors and 128 mappings in every process, where 128 descriptors are allowed."""
    done = subprocess.run(
        [sys.executable, "-c", f"COUNT = {COUNT}\n{SCRIPT}", strategy],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    values, costs, written, after, _ = json.loads(done.stdout)
    half = COUNT // 2
    assert values == [half * (half - 1)] * 4
    assert written == [-1, -2, -3, -4]
    assert after == [100] * 4
    assert {who: cost for who, cost in costs.items() if cost[0] > 64 or cost[1] > 128} == {}
