"""Every page's cells for ranks with accesses checked: the races that pages show on purpose, and no other."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.distributed.races.test_notebooks import TITLE
from tests.docs.test_examples import PAGES, ROOT, examples
from tests.harness.kernel import Kernel

ON_PURPOSE = {
    "find-a-race": ["1 data race"] * 6,
}
WITH_RANKS = [page for page in PAGES if any("%%parallel" in example.code for example in examples(page))]


def with_check(code: str) -> str:
    """Return a cell for ranks that is waited for with the flag; any other as it is."""
    first, newline, rest = code.partition("\n")
    if not re.match("%%(parallel|rank)", first) or "--async" in first or "--check-races" in first:
        return code
    return f"{first} --check-races{newline}{rest}"


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=3)
@pytest.mark.time_limit(200)
@pytest.mark.parametrize("page", WITH_RANKS, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_no_other_race(page: Path, kernel: Kernel) -> None:
    """Each cell ends as without the flag, and what its report names is what the page is about."""
    needed = {example.options.get("needs", "re") for example in examples(page)}
    missing = [module for module in needed if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"{page.name} needs {', '.join(missing)}, which is not installed")
    found, reports = [], 0
    for example in examples(page):
        if example.options.get("exec") == "false":
            continue
        outcome = kernel.run(with_check(example.code), timeout=90)
        assert outcome.ename == example.options.get("raises", ""), (
            f"{page}:{example.line}: {outcome.traceback}"
        )
        titles = [title for shown in outcome.displays for title in TITLE.findall(shown["text/plain"])]
        reports += len(titles)
        found += [f"{example.line}: {title}" for title in titles if not title.startswith("no race")]
    kernel.run("%parallel_stop")
    assert reports
    assert [entry.partition(": ")[2] for entry in found] == ON_PURPOSE.get(page.stem, []), found
