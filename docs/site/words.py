"""Count the words of the documentation: ``python -m docs.site.words`` prints them and fails above the budget.

Counted is what `wc -w` counts in what readers of site and README see, beside notebooks and the generated API.
Pages for maintainers, in ``docs/dev``, are not on the site and not counted.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
MOST_WORDS = 27_900
"""Of all pages together.  A new page makes room for itself."""
MOST_OF_A_PAGE = 2_300


def pages() -> list[Path]:
    """Return the pages that are counted."""
    found = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "notebooks/README.md")]
    apart = ("dev", "generated")
    return found + [path for path in sorted((ROOT / "docs").rglob("*.md")) if not {*apart} & {*path.parts}]


def words(path: Path) -> int:
    """Return how many words a page has, code and tables included."""
    return len(path.read_text().split())


def main() -> int:
    """Print the words of each page and of all; status 1 if there are too many."""
    counted = {path.relative_to(ROOT).as_posix(): words(path) for path in pages()}
    for name, number in counted.items():
        sys.stdout.write(f"{number:6,} {name}\n")
    total = sum(counted.values())
    sys.stdout.write(f"{total:6,} of at most {MOST_WORDS:,}\n")
    return int(total > MOST_WORDS or max(counted.values()) > MOST_OF_A_PAGE)


if __name__ == "__main__":
    sys.exit(main())
