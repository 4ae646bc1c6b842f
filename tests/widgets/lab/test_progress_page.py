"""Progress bars of ranks in a real JupyterLab."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.widgets.lab.notebook_page import NotebookPage

BARS = """%%parallel -n 3{flags}
import time
from tqdm import tqdm
for step in tqdm(range(60), desc=f"r{{rank}}", position=rank):
    time.sleep(0.05)
"""


@pytest.mark.parametrize("flags", ["", " --output stream"])
def test_bars_change_in_their_place(notebook: NotebookPage, pictures: Path, flags: str) -> None:
    """One line a rank while the cell runs, and the last state when it has ended, on the page and saved."""
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    cell = notebook.begin(BARS.format(flags=flags))
    cell.output.get_by_text(re.compile(r"r2: +[3-8]\d%\|")).first.wait_for(timeout=20_000)
    shown = [line for line in cell.text.splitlines() if "%|" in line]
    assert [line.partition(":")[0] for line in shown] == [f"[rank {rank}] r{rank}" for rank in range(3)]
    assert "[rank 0]\n" not in cell.text
    cell.picture(pictures / f"running{flags.strip().replace(' ', '')}.png")
    cell.wait()
    lines = [line for line in cell.text.splitlines() if line]
    assert len(lines) == 3 + ("from now on" in cell.text) + ("each rank has" in cell.text), cell.text
    assert sum("100%|" in line and "60/60" in line for line in lines) == 3
    saved = "".join(str(output) for output in cell.outputs)
    assert "\\r" not in saved
    assert saved.count("%|") == 3
    cell.picture(pictures / f"ended{flags.strip().replace(' ', '')}.png")
