"""The temporary folder of a root, in which its fork server and its managers have their sockets."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nbparallel.testing.waiting import wait_until

ROOT = """
import os, signal, sys
import nbparallel.multiprocessing as mp
from nbparallel.multiprocessing import household
pipe = mp.Pipe()
process = mp.get_context("forkserver").Process(target=int)
process.start(); process.join()
assert process.exitcode == 0
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_goes_with_a_root_that_is_killed(number, tmp_path, promised):
    """A kernel that takes long to end is ended so by its front end: the supervisor removes what it left."""
    code = ROOT + "print(flush=True); signal.pause()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=_environment(tmp_path)
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        assert any(path.name.startswith("listener-") for path in tmp_path.rglob("*"))
        process.send_signal(number)
        with promised(1.0):
            wait_until(lambda: not list(tmp_path.iterdir()), lambda: sorted(tmp_path.rglob("*")))


@pytest.mark.slow
def test_it_stays_while_the_root_lives(tmp_path):
    """The end of a household does not take away what the process still uses; that is its own last step."""
    code = ROOT + (
        "household.stop()\n"
        "with mp.Manager() as manager:\n    assert manager.list([1])[0] == 1\n"
        "process = mp.get_context('forkserver').Process(target=int)\n"
        "process.start(); process.join()\n"
        "assert process.exitcode == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], env=_environment(tmp_path), check=True, timeout=60)
    assert not list(tmp_path.iterdir())


def test_it_stays_if_it_is_of_another_process(tmp_path):
    """A root that inherited the folder of its parent leaves it where it is."""
    code = (
        "import os, signal, select\nfrom multiprocessing.util import get_temp_dir\nfolder = get_temp_dir()\n"
        "reading, writing = os.pipe()\n"
        "if not (pid := os.fork()):\n"
        "    from nbparallel.multiprocessing import household\n"
        "    household.membership()\n"
        "    os.write(writing, b'%d' % household.report().supervisor)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "supervisor = os.pidfd_open(int(os.read(reading, 20)))\n"
        "assert os.waitpid(pid, 0)[1] == signal.SIGKILL\n"
        "assert select.select([supervisor], [], [], 30)[0]\n"
        "assert os.path.isdir(folder)\n"
    )
    subprocess.run([sys.executable, "-c", code], env=_environment(tmp_path), check=True, timeout=60)
    assert not list(tmp_path.iterdir())


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(folder)}
