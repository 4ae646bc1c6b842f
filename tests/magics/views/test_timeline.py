"""`%parallel_timeline`: its errors in one line, the file it writes, and a whole cell in a real kernel."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbparallel.session.monitoring.timeline import COMPUTING, RankRow, Span, Timeline
from tests.harness.kernel import Kernel

FOUND = Timeline(
    1, 0.5, (RankRow(0, 7, 0.0, 0.5, (Span(COMPUTING, 0.0, 0.5),), (), 0, 0),), ("%%parallel", "x")
)


def error_of(notebook: Any, line: str) -> str:
    """Return the one line in which a magic fails."""
    out = notebook.run(line)
    assert type(out.error).__name__ == "UsageError"
    text = str(out.error)
    assert "\n" not in text
    return text


def test_mistakes_are_said_in_a_line(notebook: Any, tmp_path: Path) -> None:
    """No cell yet, a cell that still runs, a file that is something else, a folder that is not there."""
    assert "no cell has run on these ranks yet: run a %%parallel cell first" in error_of(
        notebook, "%parallel_timeline"
    )
    notebook.run("%%parallel -n 2\nx")
    notebook.sessions.timeline = lambda self: None
    assert "no cell has run" in error_of(notebook, "%parallel_timeline")
    notebook.sessions.timeline = lambda self: FOUND
    precious = tmp_path / "precious.json"
    precious.write_text('{"mine": 1}')
    assert "exists and is no trace of nbparallel: choose another name" in error_of(
        notebook, f"%parallel_timeline --save {precious}"
    )
    assert precious.read_text() == '{"mine": 1}'
    assert "is no trace of nbparallel" in error_of(notebook, f"%parallel_timeline --save {tmp_path}")
    missing = tmp_path / "no" / "t.json"
    assert f"{missing} cannot be written: No such file or directory" in error_of(
        notebook, f"%parallel_timeline --save {missing}"
    )
    for flags in ("--from 0.5", "--from 0.4 --to 0.4"):
        assert "s: the cell took 500 ms" in error_of(notebook, f"%parallel_timeline {flags}")
    assert "--save writes the whole cell" in error_of(notebook, "%parallel_timeline --to 1 --save x.json")
    state = notebook.shell.magics_manager.registry["ParallelMagics"].state
    state.background = SimpleNamespace(done=lambda: False)
    assert "still runs: wait for it with %parallel_result" in error_of(notebook, "%parallel_timeline")


def test_a_part_is_shown(notebook: Any) -> None:
    """`--from` and `--to` show what happened between them, and its sums."""
    notebook.run("%%parallel -n 2\nx")
    notebook.sessions.timeline = lambda self: FOUND
    for flags, words in (("--from 0.1 --to 0.3", ": 100 ms to 300 ms"), ("--from 0 --to 0.2", ": 200 ms")):
        (shown,) = notebook.run(f"%parallel_timeline {flags}").outputs
        assert f"In[1] on rank 0{words}" in shown.data["text/plain"]


def test_a_trace_is_written_again(notebook: Any, tmp_path: Path) -> None:
    """A trace that is there is replaced: the cell may be run again."""
    notebook.run("%%parallel -n 2\nx")
    notebook.sessions.timeline = lambda self: FOUND
    for _ in range(2):
        out = notebook.run(f"%parallel_timeline --save {tmp_path}/t.json")
        assert out.error is None
        assert re.search(r"t\.json: \d+ trace events; open it at https://ui\.perfetto\.dev", out.stdout)
    assert json.loads((tmp_path / "t.json").read_text())["otherData"]["producer"] == "nbparallel"


@pytest.mark.slow
@pytest.mark.time_limit(120)
def test_a_real_cell(kernel: Kernel) -> None:
    """The picture of a cell shows who waited for whom on which line, also of an --async cell that failed."""
    kernel.run("%load_ext nbparallel")
    kernel.run("%%parallel -n 2\nimport time\ntime.sleep(0.3 * rank)\nall_reduce(1)", timeout=60)
    outcome = kernel.run("%parallel_timeline")
    assert outcome.status == "ok", outcome.traceback
    (display,) = outcome.displays
    assert "<svg" in display["text/html"]
    text = display["text/plain"]
    assert text.splitlines()[1].startswith("In[2] on ranks 0-1: ")
    assert re.match(r"rank 1 came last to all_reduce \(line 4\): rank 0 waited \S+ m?s\n", text)
    assert re.search(r"rank 0 +rank 1 +all_reduce +4 +all_reduce\(1\)", text)
    kernel.run("%%parallel --async\ntime.sleep(0.1)\nraise ValueError(rank)", timeout=60)
    kernel.run("%parallel_result", timeout=60)
    assert kernel.run("%parallel_timeline").displays[0]["text/plain"].splitlines()[1].startswith("In[4] on")
    saved = kernel.run("%parallel_timeline --save t.json\nimport json; len(json.load(open('t.json')))")
    assert saved.result == "3", saved.traceback
