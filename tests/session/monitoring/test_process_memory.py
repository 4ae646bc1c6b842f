"""Memory of ranks: what only one process has, and shared pages, are two numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.session import Session
from nbparallel.session.monitoring.activity import read_memory

MIB = 1 << 20


@pytest.mark.slow
def test_a_shared_array_is_no_memory_of_the_rank() -> None:
    """A rank that touches 100 MiB of the notebook's has them as shared pages; what it makes is its own."""
    namespace: dict[str, Any] = {"x": nbp.share(np.ones(100 * MIB // 8))}
    with Session(2) as session:
        session.run("import numpy as np", namespace=namespace)
        before = session.statistics().ranks
        session.run("x.sum() if rank else None", namespace=namespace)
        session.run("y = np.ones(50 * 2**20 // 8) if rank == 0 else None")
        after, now = session.statistics().ranks, session.activity().ranks
        assert after[1].mapped_nbytes - before[1].mapped_nbytes > 99 * MIB
        assert after[1].private_nbytes - before[1].private_nbytes < 10 * MIB
        assert after[0].private_nbytes - before[0].private_nbytes >= 50 * MIB
        assert after[0].mapped_nbytes - before[0].mapped_nbytes < 10 * MIB
        for rank, seen in zip(after, now, strict=True):
            assert rank.rss_nbytes >= rank.private_nbytes + rank.mapped_nbytes
            assert abs(rank.private_nbytes - seen.private_nbytes) < 10 * MIB
            assert abs(rank.mapped_nbytes - seen.mapped_nbytes) < 10 * MIB


def test_what_the_system_says() -> None:
    """Kinds of memory are kept apart; a process that has ended, or ends, has none."""
    text = "Name:\tpython\nState:\tT (stopped)\nVmRSS:\t 100 kB\nRssAnon:\t 30 kB\nRssFile:\t 50 kB\n"
    seen = read_memory(7, lambda path: text + "RssShmem:\t 20 kB\nThreads:\t3\n" if "/7/" in path else "")
    assert list(seen.values()) == [100 << 10, 30 << 10, 20 << 10, 3, True]
    assert read_memory(7, lambda path: "Name:\tpython\nState:\tZ (zombie)\n") == {}
    assert read_memory(1 << 30) == {}
