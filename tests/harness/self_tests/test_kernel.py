"""The kernel harness runs cells in a real kernel, old and new, and says what came of them."""

import pytest

from tests.harness.kernel import Kernel


@pytest.mark.time_limit(60)
def test_what_a_cell_says_is_kept(any_kernel: Kernel) -> None:
    """Streams, result, display and error of a cell come back with times, each in its own cell."""
    outcome = any_kernel.run("import sys; print('hello'); print('oops', file=sys.stderr); 6 * 7")
    assert (outcome.status, outcome.stdout, outcome.stderr, outcome.result) == (
        "ok",
        "hello\n",
        "oops\n",
        "42",
    )
    assert outcome.execution_count == 1
    shown = any_kernel.run("from IPython.display import display, HTML; display(HTML('<b>x</b>'))")
    assert shown.displays[0]["text/html"] == "<b>x</b>"
    failed = any_kernel.run("print('before'); 1 / 0")
    assert (failed.status, failed.ename, failed.evalue) == ("error", "ZeroDivisionError", "division by zero")
    assert failed.stdout == "before\n"
    assert "ZeroDivisionError" in failed.traceback
    major = any_kernel.run("import ipykernel; print(ipykernel.version_info[0])").stdout.strip()
    assert major in {"6", "7"}


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_interrupt_and_descendants(kernel: Kernel) -> None:
    """An interrupt ends the running cell as a KeyboardInterrupt; processes below the kernel are listed."""
    kernel.run("import subprocess, time; child = subprocess.Popen(['sleep', '60'])")
    assert any("sleep 60" in record.command for record in kernel.descendants())
    cell = kernel.begin("print('waiting', flush=True)\ntime.sleep(60)")
    cell.wait_for("waiting")
    kernel.interrupt()
    outcome = cell.wait()
    assert (outcome.status, outcome.ename) == ("error", "KeyboardInterrupt")
    kernel.run("child.kill(); child.wait()")


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_kill_and_restart(kernel: Kernel) -> None:
    """A killed kernel's cell is reported as died; a restarted kernel has forgotten its names."""
    kernel.run("x = 1")
    kernel.restart(now=True)
    assert kernel.run("x").ename == "NameError"
    cell = kernel.begin("import os; print(os.getpid(), flush=True); import time; time.sleep(60)")
    cell.wait_for(str(kernel.pid))
    kernel.kill()
    assert cell.wait().status == "died"
    assert not kernel.alive


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_waits_are_bounded(kernel: Kernel) -> None:
    """A cell that does not end in time raises with what it printed."""
    cell = kernel.begin("print('still here', flush=True); import time; time.sleep(60)")
    cell.wait_for("still here")
    with pytest.raises(TimeoutError, match="still here"):
        cell.wait(timeout=0.2)
    kernel.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"
