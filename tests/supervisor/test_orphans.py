"""Processes that a dead session has left: ended by the record in their environment, and told in a line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from nbparallel.supervisor.orphans import end_orphans, orphans_text
from tests.supervisor.leftovers import DEAD, ME, owner

pytestmark = pytest.mark.usefixtures("no_pointers")


def test_the_line_about_processes() -> None:
    """One, several, none."""
    assert orphans_text(0) == ""
    assert orphans_text(1) == "ended 1 process that a killed session had left running"
    assert orphans_text(2) == "ended 2 processes that a killed session had left running"


def test_an_orphan_is_told_by_the_record_in_its_environment() -> None:
    """Who bears a dead session's record is ended; who bears a living one's, none or half of one is not."""
    started = []
    for record in (owner(DEAD).text(), owner(ME).text(), "", owner(DEAD).text()[:-1]):
        environment = {**os.environ, "NBP_OWNER": record}
        words = [sys.executable, "-c", "print(flush=True); input()"]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=environment))
    for child in started:
        assert child.stdout is not None
        child.stdout.readline()
    end_orphans()  # or another session of this machine was quicker
    assert started[0].wait(10) == -signal.SIGKILL
    assert [child.poll() for child in started[1:]] == [None] * 3
    for child in started:
        with child:
            child.kill()
