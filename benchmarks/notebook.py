"""Code that is timed inside a real kernel, and the answers it prints."""

from __future__ import annotations

import ast
from typing import Any

from tests.harness.kernel import Kernel

START_IPYPARALLEL = """
import logging, ipyparallel
cluster = ipyparallel.Cluster(n=4, log_level=logging.ERROR)
client = cluster.start_and_connect_sync(activate=True)
"""
STOP_IPYPARALLEL = "cluster.stop_cluster_sync()"
START_DASK = """
import distributed
dask = distributed.Client(n_workers=4, threads_per_worker=1, dashboard_address=None)
workers = list(dask.nthreads())
"""
STOP_DASK = "dask.shutdown()"
TIMER = '''
import time
from IPython.utils.capture import capture_output

def timed(call):
    """Seconds of one call whose output is not shown; a call that times itself returns them."""
    with capture_output():
        started = time.perf_counter()
        own = call()
        return own if isinstance(own, float) else time.perf_counter() - started

def take_turns(rounds, **calls):
    """All times of every call; a first round is not counted."""
    times = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            seconds = timed(call)
            if turn:
                times[name].append(seconds)
    return times

def magic(name, line, cell):
    """A call that runs a cell magic."""
    return lambda: get_ipython().run_cell_magic(name, line, cell)
'''


def run(kernel: Kernel, code: str, *, timeout: float = 60.0) -> str:
    """Run a cell that must succeed; return what it printed."""
    outcome = kernel.run(code, timeout=timeout)
    if outcome.status != "ok":
        raise RuntimeError(f"{code}\nended with {outcome.status}: {outcome.traceback}{outcome.stderr}")
    return outcome.stdout


def answer(kernel: Kernel, code: str, *, timeout: float = 120.0) -> Any:
    """Run a cell whose last printed line is a Python literal; return that."""
    return ast.literal_eval(run(kernel, code, timeout=timeout).strip().splitlines()[-1])
