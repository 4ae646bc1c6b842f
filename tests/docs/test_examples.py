"""Every example of the documentation runs, as cells of one kernel per page, in order.

A fence may say why it does not: ```` ```python exec="false" reason="…" ````, or which exception the cell
is there to show: ```` ```python raises="ZeroDivisionError" ````, or what its page needs beyond what every
installation has: ```` ```python needs="torch" ````.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.kernel import Kernel
from tests.magics.cells import text

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
_FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
_OPTION = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Example:
    """One fenced block of Python."""

    line: int
    options: dict[str, str]
    code: str


def examples(page: Path) -> list[Example]:
    """Return the Python blocks of a page, in order."""
    text = page.read_text()
    return [
        Example(text[: found.start()].count("\n") + 1, dict(_OPTION.findall(found[2])), found[3])
        for found in _FENCE.finditer(text)
        if found[1] == "python"
    ]


def test_the_readme_has_examples() -> None:
    """The page that everybody reads first is among those that are run."""
    assert len(examples(ROOT / "README.md")) >= 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_that_do_not_run_say_why(page: Path) -> None:
    """Opting out of being run takes a reason."""
    silent = [
        e.line for e in examples(page) if e.options.get("exec") == "false" and not e.options.get("reason")
    ]
    assert not silent, f"lines {silent} of {page}"


@pytest.mark.matrix(cover=(), size=3)
@pytest.mark.time_limit(150)
@pytest.mark.parametrize(
    "page", [page for page in PAGES if examples(page)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_examples_run(page: Path, kernel: Kernel) -> None:
    """Every block ends as it says: without an error, or with the one that it shows."""
    needed = {example.options.get("needs", "re") for example in examples(page)}
    missing = [module for module in needed if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"{page.name} needs {', '.join(missing)}, which is not installed")
    for example in examples(page):
        if example.options.get("exec") == "false":
            continue
        outcome = kernel.run(example.code, timeout=60)
        assert outcome.ename == example.options.get("raises", ""), (
            f"{page}:{example.line}: {outcome.status}\n{outcome.traceback}"
        )
    if any("%load_ext nbparallel" in example.code for example in examples(page)):
        assert kernel.run("%parallel_stop").status == "ok"


def test_the_readmes_first_output_is_what_its_cells_print(kernel: Kernel) -> None:
    """Word for word, of all ranks: a person who types the cells compares."""
    first, second = examples(ROOT / "README.md")[:2]
    shown = next(
        found[3] for found in _FENCE.finditer((ROOT / "README.md").read_text()) if found[1] == "text"
    )
    kernel.run(first.code)
    assert text(kernel.run(second.code)).strip() == shown.strip()
    kernel.run("%parallel_stop")
