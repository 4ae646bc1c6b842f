"""What the template does once, so that no rank has to: a rank's start and its first cell find it done."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import inspect, re, sys, types
from unittest import mock
from nbparallel.distributed import tracing
from nbparallel.distributed.communicator import TRACED, Communicator
from nbparallel.engine import environment, main

main.prepare()
modules, calls = set(sys.modules), []
for owner, name in ((re._compiler, "compile"), (inspect, "signature"), (environment, "ThreadpoolController")):
    mock.patch.object(owner, name, lambda *a, name=name, **k: calls.append(name)).start()
environment.random_streams(1, 0)
environment.ThreadLimits(1, 1)
shell = main.RankShell.instance()
shell.logger
assert shell.transform_cell("x = 1") == "x = 1\\n"
for name in TRACED:
    tracing.peer_argument(types.MethodType(getattr(Communicator, name), object()))
print(sorted(set(sys.modules) - modules), calls)
"""


@pytest.mark.slow
def test_ranks_find_prepared_what_all_of_them_need() -> None:
    """No module, no regular expression, no signature and no list of libraries is left to each rank."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stdout == "[] []\n", done.stderr
