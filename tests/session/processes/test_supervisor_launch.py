"""A supervisor that is started early: light to import, owned by one, ended if nobody takes it."""

from __future__ import annotations

import subprocess
import sys


def test_starting_a_supervisor_imports_nothing_heavy() -> None:
    """Neither numpy nor IPython nor the rest of the session is needed to get the template going."""
    program = (
        "import sys; import nbparallel.session.processes.launch; "
        "print([name for name in ('numpy', 'IPython', 'cloudpickle', 'nbparallel.session.session', "
        "'nbparallel.sharing') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_first_cell_imports_nothing_that_it_does_not_need() -> None:
    """What makes pictures of a session, and random numbers for checksums, come with who asks for them."""
    program = (
        "import sys; from nbparallel.session import Session; "
        "import numpy; random = ['numpy.random'] * (numpy.__version__ >= '2'); "
        "print([name for name in (*random, 'nbparallel.session.monitoring.segments', "
        "'nbparallel.session.monitoring.segments', 'nbparallel.session.monitoring.activity') "
        "if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
