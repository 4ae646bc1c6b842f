"""The magics of a session on hosts, in a real kernel whose hosts are objects of it."""

from __future__ import annotations

import pytest

from tests.harness.kernel import Kernel

pytestmark = [pytest.mark.time_limit(90), pytest.mark.slow]
START = """
%load_ext nbparallel
%config NbParallel.welcome = False
import numpy as np
from tests.harness.clusters import Loopback
cluster, x = Loopback(["a", "b"], cpus=1), np.arange(3)
"""


def _said(kernel: Kernel, code: str) -> str:
    """Run a cell; return all that it showed."""
    outcome = kernel.run(code, 30)
    shown = [str(display.get("text/plain", "")) for display in outcome.displays]
    return "\n".join([outcome.stdout, outcome.stderr, outcome.result, outcome.traceback, *shown])


def test_a_notebook_on_hosts(shared_kernel: Kernel) -> None:
    """`%parallel_cluster` has ranks there and shows hosts; `-r @name` picks one; `%parallel_push` sends."""
    assert shared_kernel.run(START).status == "ok"
    expected = {
        "%parallel_cluster": "no cluster is used",
        "%parallel_cluster nothing": "no variable 'nothing'",
        "%parallel_cluster x": "must be a Client of dask.distributed",
        "%parallel_cluster cluster": "2 ranks on 2 hosts",
        "%parallel_panel": "no ranks are running",
        "%parallel -o sums int(x.sum())": "sent to 2 hosts",
        "%parallel -r @b print('here', rank)": "[rank 1] here 1",
        "%parallel_panel ": "host b",
        "%parallel_panel --close": "",
        "%parallel_status": "2 ranks: idle\nrank  host  computing",
        "%parallel_who": "1 name on ranks 0-1",
        "%parallel_segments": "host a",
        "%parallel_doctor": "as safe as the cluster, loopback://",
        "%parallel_timeline": "host b\nrank 1 |",
        "%parallel 1 / (rank - 1)": "ZeroDivisionError on rank 1 (host b)",
        "%parallel_tb": "[rank 1 (host b)]",
        "%parallel_tb -r @b": "[rank 1 (host b)]",
        "%parallel_tb -r @a": "rank 0 (host a) raised nothing; rank 1 (host b) did",
        "%debug -r @b": "%debug: no user can be asked: ",
        "%parallel all_reduce(rank, async_op=True)": "leave async_op out",
        "%parallel_cluster ": "2 ranks on 2 hosts",
        "%parallel -r @c rank": "there is no host 'c': hosts are a, b",
        "x[0] = 100\n%parallel_push x": "",
        "%parallel -o sums int(x.sum())\nprint(list(sums))": "[103, 103]",
        "%%parallel --share x\nran = x": "x cannot be shared with hosts",
        "%%parallel --share x\nran = x ": "have each rank return its part",
        "%share x": "an array of its own with nbp.zeros",
        "import nbparallel\nz = nbparallel.zeros(3)\n%parallel ran = z": "'z' is an array that ranks may",
        "%parallel ran = z": "to send a copy: `z_here = z.copy()`",
        "z_here = z.copy()\n%parallel -o copied float(z_here.sum())\nprint(list(copied))": "[0.0, 0.0]",
        "%parallel -o began 'ran' in globals()\nprint(list(began))": "[False, False]",
        "%%parallel -n 4\nrank": "fixed when it is made",
        "%%parallel -n 1\nrank ": "fixed when it is made",
        "%parallel_cluster cluster ": "%parallel_stop first",
        "%parallel_stop": "unless %parallel_cluster names the cluster again",
        "cluster = Loopback(['c'])\n%parallel_cluster --ranks-per-host 3 cluster": "3 ranks on 1 host",
        "%parallel_stop ": "no ranks are running",
    }
    for code, text in expected.items():
        said = _said(shared_kernel, code)
        assert text in said, (code, said)


def test_hosts_of_a_session_on_one_machine(shared_kernel: Kernel) -> None:
    """There are none to pick."""
    assert shared_kernel.run(START).status == "ok"
    assert "the session is on one machine" in _said(shared_kernel, "%parallel -r @a rank")
