"""Examples on the page of each name: the cell of ``docs/reference/examples.md`` that uses it first.

The test of that page runs the cells, so that what a name's page shows has run.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "reference" / "examples.md"
_FENCE = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def example_of(name: str, text: str) -> str:
    r"""Return the first cell of a page that uses a name; empty if none does.

    >>> example_of("send", "```python\nsend(1, 2)\n```\n")
    'send(1, 2)\n'
    """
    uses = re.compile(rf"(?<![\w\".]){re.escape(name)}\b(?!\s*=[^=])|\b(dist|nbp)\.{re.escape(name)}\b")
    return next((cell for cell in _FENCE.findall(text) if uses.search(cell)), "")


def _add(_app: Any, kind: str, name: str, _thing: Any, _options: Any, lines: list[str]) -> None:
    if kind not in ("function", "class", "data") or "Examples" in lines:
        return
    cell = example_of(name.rpartition(".")[2], PAGE.read_text())
    if cell:
        block = [".. code-block:: ipython3", "", *(f"   {line}" for line in cell.splitlines())]
        lines += ["", "Examples", "--------", *block, ""]


def setup(app: Any) -> dict[str, bool]:
    """Add examples before numpydoc reads the sections."""
    app.connect("autodoc-process-docstring", _add, priority=100)
    return {"parallel_read_safe": True}
