"""The list of faults: every id that a test names is a row of it, and every row has a test."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
ID = re.compile(r"\bF\d{1,2}\b|(?<=_)f\d{1,2}(?=_)")


def test_rows_and_tests_name_the_same_faults() -> None:
    """No id in a test is undefined, no row of the list is without a test."""
    page = (ROOT / "tests" / "faults" / "README.md").read_text()
    rows = re.findall(r"^\| (F\d+) \|", page, re.MULTILINE)
    assert len(rows) == len(set(rows)) > 50
    named = set()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        named |= {found.upper() for found in ID.findall(path.read_text())}
    assert named == set(rows)
