"""What `%load_ext nbparallel` starts in the background: it is used, it is never wrong, it never stays."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import nbparallel_magics
from nbparallel.errors import StartError
from tests.harness.kernel import Kernel

pytestmark = pytest.mark.time_limit(90)
LOAD = "%load_ext nbparallel"
OFF = "get_ipython().config.NbParallel.warm = False\n"
ENDED = 2.0
"""What `%parallel_stop` promises."""


def supervisors(kernel: Kernel) -> set[int]:
    """Return the supervisors below a kernel."""
    return {record.pid for record in kernel.descendants() if "supervisor.main" in record.command}


def templates(kernel: Kernel) -> set[int]:
    """Return the templates below a kernel, and the ranks forked from them."""
    return {record.pid for record in kernel.descendants() if "engine.template" in record.command}


def until_ready(kernel: Kernel) -> set[int]:
    """Wait until a supervisor and a template sleep below a kernel; return both."""

    def ready() -> bool:
        found = kernel.descendants()
        return [record.state for record in found] == ["S", "S"] and bool(templates(kernel))

    kernel.wait_until(ready, 15, "template that waits")
    return {record.pid for record in kernel.descendants()}


@pytest.mark.slow
@pytest.mark.every_kernel
def test_the_first_cell_uses_what_waits(any_kernel: Kernel) -> None:
    """Loading says nothing, imports and begins no thread; the same two processes are the first cell's."""
    kernel = any_kernel
    kernel.run("import sys, threading; threads = threading.active_count()")
    loading = kernel.run(LOAD)
    assert [m.kind for m in loading.messages if m.kind not in ("status", "execute_input")] == []
    waiting = until_ready(kernel)
    late = {"numpy", "nbparallel_widgets", "nbparallel.wire.messages", "nbparallel.wire.inspection"}
    state = kernel.run(f"threading.active_count() == threads, {late} & set(sys.modules)")
    assert state.result == "(True, set())"
    assert "no ranks are running" in kernel.run("%parallel_status").stdout
    kernel.run("import math\n1 / 0")
    assert {record.pid for record in kernel.descendants()} == waiting, "no cell of the notebook disturbs it"
    assert kernel.run("%%parallel -n 2 --quiet\nx = rank").status == "ok"
    with_ranks = {record.pid for record in kernel.descendants()}
    assert waiting < with_ranks
    assert len(with_ranks) == len(waiting) + 2
    operations = "[name for name in sys.modules if name.startswith('nbparallel.distributed')]"
    assert kernel.run(operations).result == "[]", "the notebook needs none of them, and they take a while"


@pytest.mark.slow
def test_a_first_cell_at_once_joins_the_start(kernel: Kernel) -> None:
    """No second supervisor and no second template, however soon the cell comes."""
    outcome = kernel.run(f"{LOAD}\n%parallel -n 2 --quiet rank")
    assert outcome.status == "ok", outcome.traceback
    assert len(supervisors(kernel)) == 1
    assert len(templates(kernel)) == 3


@pytest.mark.slow
def test_ranks_are_as_the_notebook_is_now(kernel: Kernel) -> None:
    """What a cell changed is what ranks start with; what waits is started anew, or dropped."""
    kernel.run(LOAD)
    waiting = until_ready(kernel)
    kernel.run(
        "import os, sys\nos.makedirs('later')\nopen('later/late_module.py', 'w').write('value = 7')\n"
        "os.environ['PYTHONOPTIMIZE'] = '1'\nsys.path.insert(0, os.path.abspath('later'))"
    )
    renewed = until_ready(kernel)
    assert not renewed & waiting
    seen = kernel.run(
        "os.chdir('later')\nos.umask(0o027)\nos.environ['LATER'] = 'yes'\n"
        "os.environ['PYTHONDEVMODE'] = '1'\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "get_ipython().run_cell_magic('parallel', '-n 2 -o seen --quiet', '''\n"
        "import os, sys, late_module\n"
        "os.umask(0), len(os.sched_getaffinity(0)), os.environ['LATER'], late_module.value, \\\n"
        "    sys.flags.optimize, sys.flags.dev_mode, os.path.basename(os.getcwd())\n''')\nlist(seen)"
    )
    assert seen.result == str([(0o027, 1, "yes", 7, 1, True, "later")] * 2), seen.traceback
    assert not supervisors(kernel) & renewed
    assert len(supervisors(kernel)) == 1


@pytest.mark.slow
def test_what_waits_may_die(kernel: Kernel) -> None:
    """Its supervisor, its template, or a template that has not come up: the first cell does not notice."""
    for victims in (supervisors, templates):
        kernel.run(LOAD)
        until_ready(kernel)
        for pid in victims(kernel):
            os.kill(pid, signal.SIGKILL)
        assert kernel.run("%parallel -n 2 rank").stdout.endswith("Out[rank 0]: 0\nOut[rank 1]: 1\n")
        kernel.run("%unload_ext nbparallel")
    kernel.begin(LOAD)
    kernel.wait_until(lambda: bool(templates(kernel)), 15, "a template")
    for pid in templates(kernel):
        os.kill(pid, signal.SIGKILL)
    assert kernel.run("%parallel -n 1 rank").stdout.endswith("Out[rank 0]: 0\n")


@pytest.mark.slow
def test_nobody_who_does_not_want_it_keeps_it(kernel: Kernel) -> None:
    """`%parallel_stop`, unloading, `%config`: no child of ours is left, whether it has come up or not."""
    for end in ("%parallel_stop", "%unload_ext nbparallel"):
        for wait in (False, True):
            kernel.run("%reload_ext nbparallel")
            if wait:
                until_ready(kernel)
            kernel.run(end)
            assert kernel.descendants() == []


@pytest.mark.slow
def test_a_child_of_the_notebook_has_no_part_in_it(kernel: Kernel) -> None:
    """What it forks can neither end what waits, as it exits itself, nor keep it, while it lives."""
    kernel.run(LOAD)
    waiting = until_ready(kernel)
    kernel.run(
        "import atexit, os, signal\n"
        "def fork(act):\n    child = os.fork()\n    if child:\n        return child\n"
        "    try:\n        act()\n    finally:\n        signal.pause()\n"
        "children = fork(atexit._run_exitfuncs), fork(int)"
    )
    kernel.run("import time; time.sleep(0.2)")
    assert waiting < {record.pid for record in kernel.descendants()}
    stopped = kernel.run("%parallel_stop")
    assert stopped.seconds < ENDED
    assert str(tuple(sorted(record.pid for record in kernel.descendants()))) == kernel.run("children").result
    kernel.run("for child in children: os.kill(child, signal.SIGKILL), os.waitpid(child, 0)")


@pytest.mark.slow
def test_it_can_be_switched_off(kernel: Kernel) -> None:
    """Before loading nothing is started; afterwards what waits is ended with the cell that says so."""
    kernel.run(OFF + LOAD)
    assert kernel.descendants() == []
    assert kernel.run("%parallel -n 1 --quiet rank").status == "ok"
    kernel.run("%unload_ext nbparallel\nget_ipython().config.NbParallel.warm = True")
    kernel.run(LOAD)
    until_ready(kernel)
    kernel.run("%config NbParallel.warm = False")
    assert kernel.descendants() == []


def test_what_cannot_be_started_is_no_error_yet(
    monkeypatch: pytest.MonkeyPatch, shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where processes cannot be started the extension loads, silently; the first cell will say why."""

    def refuse(start_method: str) -> Any:
        raise StartError("memfd_create does not work here")

    monkeypatch.setattr("nbparallel.session.processes.launch.SupervisorLaunch", refuse)
    nbparallel_magics.load(shell)
    try:
        assert capsys.readouterr() == ("", "")
        result = shell.run_cell("%parallel -n 1 1")
        assert isinstance(result.error_in_exec, StartError)
    finally:
        nbparallel_magics.unload(shell)
    capsys.readouterr()
