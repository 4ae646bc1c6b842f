"""Lectures on two hosts of a real cluster: unchanged, behind a first cell that names the cluster.

What cannot run there is what writes an array of the notebook's machine.  Each such cell says so, and the
others do not notice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.cluster.dask_cluster import DaskProcesses
from tests.cluster.machines.notebooks import slurm_cluster
from tests.cluster.machines.slurm_nodes import SlurmNodes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.time_limit(400),
    pytest.mark.may_leave(
        "descriptor", "thread", reason="the client keeps connections, and Dask a thread for large messages"
    ),
]
NOTEBOOKS = Path(__file__).resolve().parents[3] / "notebooks"
SHARED = "is an array that ranks may write"
ONE_MACHINE = {
    "01-hello-ranks": {r"\b(means|scores|hits)\b": SHARED},
    "03-send-and-receive": {},
    "04-collectives": {},
    "05-training": {r"\bruns\b": SHARED},
}
"""By notebook: names of cells that cannot run on hosts, and what the first of them says."""
LEAST_CELLS = 12
"""Of each notebook: so many others are left, at least."""


@pytest.fixture(scope="module", params=["dask", "slurm"])
def cluster(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the code that makes `cluster`, of two hosts: their workers run, or jobs of Slurm start them."""
    if request.param == "dask":
        pytest.importorskip("distributed", reason="distributed is not installed: `make dask` puts it there")
        with DaskProcesses("ab") as processes:
            file = processes.scheduler_file
            yield f"from distributed import Client\ncluster = Client(scheduler_file={file!r})"
    else:
        nodes: SlurmNodes = request.getfixturevalue("slurm")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in nodes.environment.items():
                patch.setenv(name, value)
            yield slurm_cluster(nodes.address, 2)


def _problem(cell: Any) -> str:
    """Return what a cell has raised, and its message."""
    errors = [output for output in cell.outputs if output.output_type == "error"]
    return "".join(f"{error.ename}: {error.evalue}" for error in errors)


@pytest.mark.parametrize("name", ONE_MACHINE)
def test_a_lecture_runs_on_two_hosts(cluster: str, name: str) -> None:
    """Every cell does what it does on one machine, its planned mistakes as well."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    first = nbformat.v4.new_code_cell(f"%load_ext nbparallel\n{cluster}\n%parallel_cluster cluster")
    notebook.cells.insert(0, first)
    place = {"metadata": {"path": str(NOTEBOOKS)}}
    NotebookClient(notebook, allow_errors=True, timeout=120, resources=place).execute()
    assert "4 ranks on 2 hosts" in str(first.outputs)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    cells = [cell for cell in cells if "check" not in cell.metadata.get("tags", [])]  # of what students write
    others = [cell for cell in cells if not any(re.search(p, cell.source) for p in ONE_MACHINE[name])]
    for cell in others:
        planned = cell.metadata.get("nbparallel", {}).get("raises", "")
        assert bool(_problem(cell)) == bool(planned), (cell.source, _problem(cell))
        assert planned in _problem(cell), (cell.source, _problem(cell))
    assert len(others) >= LEAST_CELLS
    for names, reason in ONE_MACHINE[name].items():
        problems = [_problem(cell) for cell in cells if re.search(names, cell.source)]
        refused = [problem for problem in problems if "HostBoundaryError" in problem]
        assert refused, names
        assert all(reason in problem for problem in refused)
