"""Output that is too much for a notebook: a file that has all of it, who owns that, and when it goes."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import nbparallel_magics
from nbparallel.testing.waiting import wait_until
from nbparallel_magics.output import overflow
from nbparallel_magics.output.cell_output import CellOutput
from nbparallel_magics.output.overflow import LogFolder
from tests.magics.output.page import Page

ENDING = "until the kernel ends"


@pytest.fixture
def page() -> Page:
    """Return an empty page."""
    return Page()


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LogFolder]:
    """Return where logs go, in a temporary place of its own; nothing of it is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = LogFolder()
    yield folder
    folder.remove()
    assert os.listdir(tmp_path) == []


def log_of(page: Page) -> Path:
    """Return the file that the page names."""
    match = re.search(rf"all of it is in (\S+nbparallel-output-\S+\.log) {ENDING}", page.text)
    assert match
    return Path(match[1])


def test_beyond_the_limit_there_is_a_file(page: Page, logs: LogFolder) -> None:
    """More than the limit goes to a file that has all of it; the notebook says so and clears nothing."""
    out = CellOutput(page, limit=1000, logs=logs)
    for line in range(100):
        for rank in (1, 0):
            out.stream(rank, "stdout", f"rank {rank} line {line}\n")
    out.finish()
    text = log_of(page).read_text()
    assert text.count("line") == 200
    assert page.clears == 0
    assert page.published < 2000


def beyond_the_limit(page: Page, logs: LogFolder, send: Any) -> str:
    """Show what `send` sends and a later line under a limit of 1000; return the log."""
    out = CellOutput(page, limit=1000, logs=logs)
    send(out)
    out.stream(0, "stdout", "later\n")
    out.finish()
    assert page.published < 2000
    logged = log_of(page).read_text()
    assert logged.endswith("later\n")
    return logged


def test_one_text_that_is_too_long_is_shown_in_part(page: Page, logs: LogFolder) -> None:
    """A value, a text: its start and the notice are shown, the file has all."""
    logged = beyond_the_limit(page, logs, lambda out: out.result(0, {"text/plain": "v" * 5000}, {}))
    assert page.text.startswith("Out[rank 0]: vvv")
    assert logged.count("v") == 5000
    page = Page()
    logged = beyond_the_limit(page, logs, lambda out: out.stream(0, "stdout", "t" * 5000))
    assert page.text.startswith("[rank 0] ttt")
    assert logged.count("t") > 5000


@pytest.mark.parametrize(
    ("data", "suffix", "content"),
    [
        ({"text/plain": "a page", "text/html": "h" * 5000}, ".html", b"h" * 5000),
        ({"text/plain": "a figure", "image/png": "QUJD" * 2000}, ".png", b"ABC" * 2000),
    ],
)
def test_one_display_that_is_too_long_is_in_a_file(
    page: Page, logs: LogFolder, data: dict[str, str], suffix: str, content: bytes
) -> None:
    """Its text is shown; beside the log lies what a reader can open, for nobody else to read."""
    logged = beyond_the_limit(page, logs, lambda out: out.display(0, data, {}, {}, False))
    assert page.shown[1][1] == {"text/plain": data["text/plain"]}
    found = re.search(r"is in (\S+)\)", logged)
    assert found
    beside = Path(found[1])
    assert (beside.suffix, beside.read_bytes()) == (suffix, content)
    assert beside.stat().st_mode & 0o777 == 0o600


def test_the_file_is_this_users_and_goes_with_the_extension(shell: InteractiveShell, tmp_path: Path) -> None:
    """Nobody else may look into it; unloading removes it, and what comes later is lost, with a word."""
    nbparallel_magics.load(shell)
    state = shell.magics_manager.registry["ParallelMagics"].state
    assert state is not None
    log = Path(state.logs.new_log())
    assert log.parent.stat().st_mode & 0o777 == 0o700
    assert log.stat().st_mode & 0o777 == 0o600
    assert Path(state.logs.new_log()).parent == log.parent
    nbparallel_magics.unload(shell)
    assert not log.parent.exists()
    out = CellOutput(page := Page(), limit=10, logs=state.logs)
    out.stream(0, "stdout", "t" * 50)
    out.finish()
    assert "the rest is lost, since no file can be made for it: the extension was unloaded" in page.text


def test_a_folder_that_somebody_has_removed_is_made_again(page: Page, logs: LogFolder) -> None:
    """As systems do with what lies long in their temporary place: the next cell has its file all the same."""
    first = Path(logs.new_log()).parent
    shutil.rmtree(first)
    out = CellOutput(page, limit=10, logs=logs)
    out.stream(0, "stdout", "more than ten characters\n")
    out.finish()
    assert "more than ten" in log_of(page).read_text()
    assert not first.exists()


def test_a_forked_child_removes_nothing(logs: LogFolder) -> None:
    """A process that the notebook's own code forked ends without taking the logs along."""
    log = logs.new_log()
    child = os.fork()
    if not child:
        logs.remove()
        os._exit(0)
    os.waitpid(child, 0)
    assert os.path.exists(log)


def test_a_full_disk_is_told_and_stops_nobody(
    page: Page, logs: LogFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the file cannot be written to, or is as long as it may be, a line says so, once."""
    out = CellOutput(page, limit=10, logs=logs)
    out.stream(0, "stdout", "t" * 50)
    wait_until(lambda: ENDING in page.text)  # it is shown while the cell runs
    path = log_of(page)
    os.unlink(path)
    os.mkdir(path)  # who is root may write to any file, but to no folder
    for _ in range(3):
        out.stream(0, "stdout", "more\n")
    out.finish()
    assert page.text.count(f"lost: {path} cannot be written to (Is a directory)") == 1
    monkeypatch.setattr(overflow, "LARGEST_LOG", 100)
    out = CellOutput(page := Page(), limit=10, logs=logs)
    for _ in range(4):
        out.stream(0, "stdout", "t" * 50)
    out.finish()
    assert page.text.count("has 109 B, which is the most") == 1
