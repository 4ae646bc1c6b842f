"""Memory that is kept for reuse goes back to the system while nobody does anything."""

import time
from pathlib import Path

import pytest

import nbparallel as nbp
from nbparallel.sharing import current_store
from nbparallel.sharing.lifecycle import exported_segments
from nbparallel.testing.waiting import wait_until
from tests.session.names.memory.mapped_memory import mapped

KEEP = 0.3


@pytest.fixture(autouse=True)
def _keep_shortly(monkeypatch):
    """Wait less than half a minute."""
    monkeypatch.setattr(exported_segments, "KEEP_SECONDS", KEEP)


def cpu_seconds(pid):
    """Return the CPU time of a process."""
    return (
        sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())
        / 1e9
    )


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.time_limit(60)
def test_an_idle_rank_gives_its_pool_back():
    """What a rank has let go of is gone a while later, without a cell; then the rank sleeps again."""
    with nbp.Session(1) as session:
        pid = session.run(
            "import os, nbparallel.sharing.lifecycle.exported_segments as p\n"
            f"p.KEEP_SECONDS = {KEEP}\nos.getpid()"
        ).values[0]
        before = mapped(pid)
        session.run("import nbparallel as nbp\nx = nbp.ones(1_000_000)\ndel x")
        assert mapped(pid) >= before + 8_000_000, "it was not kept at all"
        wait_until(lambda: mapped(pid) < before + 8_000_000)
        used = cpu_seconds(pid)
        time.sleep(4 * KEEP)
        assert cpu_seconds(pid) - used < KEEP / 4


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_an_idle_notebook_gives_its_pool_back():
    """The session's thread sees to it, also where a rank was the last to let go."""
    with nbp.Session(1) as session:
        session.run("pass")
        before = mapped()
        lonely, sent = nbp.ones(1_000_000), nbp.ones(500_000)
        session.push(sent=sent)
        del lonely, sent
        current_store().drain()
        assert mapped() >= before + 12_000_000
        wait_until(lambda: mapped() < before + 8_000_000)
        session.run("del sent")
        wait_until(lambda: mapped() < before + 4_000_000)


def test_without_a_session_nothing_is_kept():
    """A script that has no session has nobody who would give it back later."""
    before = mapped()
    x = nbp.ones(1_000_000)
    assert mapped() >= before + 8_000_000
    del x
    current_store().drain()
    assert mapped() == before


@pytest.mark.slow
def test_what_is_kept_goes_with_the_session():
    """A session's end takes along what was kept for it."""
    before = mapped()
    with nbp.Session(1) as session:
        session.run("pass")
        x = nbp.ones(1_000_000)
        del x
        current_store().drain()
        assert mapped() >= before + 8_000_000
    assert mapped() == before
