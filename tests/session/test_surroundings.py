"""What a rank has in common with the notebook's process, and what it gets a share of."""

from __future__ import annotations

import pytest

from nbparallel.session import Session
from nbparallel.session.limits import usable_cpus


def test_directory_and_hashes(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notebook's directory; equal hashes of strings on all ranks."""
    monkeypatch.chdir(str(tmp_path))
    with Session(2) as session:
        assert session.run("import os; os.getcwd()").values == [str(tmp_path)] * 2
        first, second = session.run("hash('a') ^ hash('b')").values
        assert first == second
        session.restart(1)  # a process of its own time
        assert session.run("hash('a') ^ hash('b')").values == [first] * 2


@pytest.mark.skipif(usable_cpus() < 2, reason="one CPU: one thread is what a fresh process has")
def test_blas_threads() -> None:
    """A rank has the threads of its share of the CPUs, not the one that the template was kept at."""
    with Session(1) as session:
        (counts,) = session.run(
            "import threadpoolctl\n[pool['num_threads'] for pool in threadpoolctl.threadpool_info()]"
        ).values
        assert set(counts) == {usable_cpus()}
