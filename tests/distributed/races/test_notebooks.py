"""Every notebook with all its cells checked: the races that it shows on purpose are found, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from tests.docs.notebooks.test_notebooks import NOTEBOOKS, demo

ON_PURPOSE = {
    "02-shared-memory": ["1 harmless race", "1 data race", "1 data race"],
    "05-training": ["2 data races"],  # Hogwild: ranks update one model without a lock
}
TITLE = re.compile(
    r"^(?:no race(?:: no access .*| among [\d,]+ access(?:es)?)|(?:\d+ \w+ races?(?:, )?)+)$", re.MULTILINE
)


def with_checks(notebook: Path, folder: Path) -> Path:
    """Return a copy in which each cell for ranks that is waited for has the flag."""
    copied = nbformat.read(notebook, as_version=4)
    for cell in copied.cells:
        first, *rest = cell.source.split("\n")
        runs = cell.cell_type == "code" and re.match("%%(parallel|rank)", first)
        if runs and not re.search("--(async|check-races|scaling)", first):
            cell.source = "\n".join([f"{first} --check-races", *rest])
    path = folder / notebook.name
    nbformat.write(copied, path)
    return path


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=3)
@pytest.mark.time_limit(240)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_no_other_race(notebook: Path, tmp_path: Path) -> None:
    """It runs as it is planned, and its reports are those that the text expects."""
    if notebook.stem == "10-torch":
        pytest.importorskip("torch")
    checked = with_checks(notebook, tmp_path)
    done = demo(checked, tmp_path / "pictures").done
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    titles = TITLE.findall(done.stdout)
    assert titles, done.stdout[-4000:]
    found = [title for title in titles if not title.startswith("no race")]
    assert found == ON_PURPOSE.get(notebook.stem, []), done.stdout
