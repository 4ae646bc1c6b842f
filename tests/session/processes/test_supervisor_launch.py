"""A supervisor that is started early: light to import, owned by one, ended if nobody takes it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nbparallel.session import Session
from nbparallel.session.processes.launch import SupervisorLaunch
from nbparallel.testing import processes


def test_starting_a_supervisor_imports_nothing_heavy() -> None:
    """Neither numpy nor IPython nor the rest of the session is needed to get the template going."""
    program = (
        "import sys; import nbparallel.session.processes.launch; "
        "print([name for name in ('numpy', 'IPython', 'cloudpickle', 'nbparallel.session.session', "
        "'nbparallel.sharing') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_session_takes_over_what_was_started_early() -> None:
    """The supervisor is the same process, and the session ends it."""
    launch = SupervisorLaunch()
    with Session(2, launch=launch) as session:
        assert session.run("rank").values == [0, 1]
        assert session.statistics().supervisor_pid == launch.popen.pid
        assert session.statistics().session == launch.session


def test_an_unused_supervisor_is_terminated() -> None:
    """`terminate`, or stopping a session that never ran, ends the process that was started early."""
    for end in (SupervisorLaunch.terminate, lambda launch: Session(2, launch=launch).stop()):
        launch = SupervisorLaunch()
        running = processes.read(launch.popen.pid)
        assert running is not None
        assert running.parent == os.getpid()
        end(launch)
        now = processes.read(running.pid)
        assert now is None or now.started != running.started


def test_a_first_cell_imports_nothing_that_it_does_not_need() -> None:
    """What makes pictures of a session, and random numbers for checksums, come with who asks for them."""
    program = (
        "import sys; from nbparallel.session import Session; "
        "import numpy; random = ['numpy.random'] * (numpy.__version__ >= '2'); "
        "print([name for name in (*random, 'nbparallel.session.monitoring.statistics', "
        "'nbparallel.session.monitoring.who', 'nbparallel.session.monitoring.activity') "
        "if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
