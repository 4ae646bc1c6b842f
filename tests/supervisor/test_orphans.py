"""Processes that a dead session has left: ended by the record in their environment, and told in a line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from nbparallel.supervisor.children import end_orphans, mark_children, orphans_text
from nbparallel.wire.identity import process_of


def test_an_orphan_is_told_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose notebook and supervisor are dead is ended; where one lives, or nothing is said, it is not."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as gone:
        dead = process_of(gone.pid)
        gone.kill()
    monkeypatch.setenv("NBP_OWNER", "")
    mark_children(os.getpid())
    place = os.environ["NBP_OWNER"].split(" ")[0]
    me = process_of(os.getpid())
    ended, living = f"{dead.pid}:{dead.started}", f"{me.pid}:{me.started}"
    reused = f"{me.pid}:{me.started + 1}"
    started = []
    marks = (
        f"{place} {ended} {reused}",
        f"{place} {ended} {living}",
        f"1:2 {ended}",
        f"{place} {me.pid}:0",
        "",
    )
    for mark in marks:
        environment = {**os.environ, "NBP_OWNER": mark}
        words = [sys.executable, "-c", "print(flush=True); input()"]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=environment))
    for child in started:
        assert child.stdout is not None
        child.stdout.readline()
    end_orphans()  # or another session of this machine was quicker
    assert started[0].wait(10) == -signal.SIGKILL
    assert [child.poll() for child in started[1:]] == [None] * 4
    for child in started:
        with child:
            child.kill()


def test_the_line_about_processes() -> None:
    """One, several, none."""
    assert orphans_text(0) == ""
    assert orphans_text(1) == "ended 1 process that a killed session had left running"
    assert orphans_text(2) == "ended 2 processes that a killed session had left running"
