"""F23: `stop` from another thread, at any moment of `run`: no rank is there afterwards."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from nbparallel.errors import ClosedError
from nbparallel.session import Session, session as sessions
from nbparallel.session.names.delivery import NameDelivery
from nbparallel.session.processes.elastic_pool import ElasticPool
from nbparallel.session.processes.launch import SupervisorLaunch
from nbparallel.session.processes.rank_pool import RankPool
from nbparallel.session.processes.supervisor_client import SupervisorClient
from nbparallel.session.tasks.dispatch import TaskDispatcher
from nbparallel.testing.processes import family

PLACES: dict[str, tuple[Any, str]] = {
    "the first line": (sessions, "check_cell"),
    "before the ranks": (ElasticPool, "ensure"),
    "before the supervisor": (SupervisorLaunch, "__init__"),
    "the supervisor": (SupervisorClient, "__init__"),
    "a rank": (SupervisorClient, "spawn"),
    "waiting for ranks": (RankPool, "next_event"),
    "the end of the start": (NameDelivery, "connect"),
    "names": (NameDelivery, "gather"),
    "before it is sent": (RankPool, "ensure_epoch"),
    "waiting for the cell": (TaskDispatcher, "finish"),
}


def stop_at(monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str], session: Session, *, wait: bool) -> Any:
    """Stop the session in another thread when that function first begins; return the threads."""
    owner, name = place
    function: Callable[..., Any] = getattr(owner, name)
    threads: list[threading.Thread] = []

    def stop_first(*args: Any, **options: Any) -> Any:
        if not threads:
            threads.append(threading.Thread(target=session.stop))
            threads[0].start()
            if wait:
                threads[0].join(1.5)  # `stop` itself waits a second for this thread
        return function(*args, **options)

    monkeypatch.setattr(owner, name, stop_first)
    return threads


@pytest.mark.matrix(cover=(), size=2)
@pytest.mark.time_limit(60)
@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("where", PLACES)
def test_f23_stop_while_another_thread_runs(
    monkeypatch: pytest.MonkeyPatch, where: str, wait: bool, running: bool
) -> None:
    """`run` raises ClosedError (or has ended), nothing is started any more, and nothing is left."""
    session = Session(1)
    if running:
        session.run("pass")
    with monkeypatch.context() as patched:
        threads = stop_at(patched, PLACES[where], session, wait=wait)
        try:
            session.run("x = 1", namespace={})
        except ClosedError:
            pass
        else:
            assert not threads or where == "waiting for the cell" or not wait
        for thread in threads:
            thread.join()
    session.stop()
    assert list(family(os.getpid(), os.environ["NBP_TEST_RUN"])) == []
    assert not session.started
    with pytest.raises(ClosedError, match="make a new one"):
        session.run("1")
