"""The site as `make docs` has built it: complete, and without a request to another host."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SITE = Path(os.environ.get("NBP_SITE", "/nowhere"))
pytestmark = [
    pytest.mark.skipif("NBP_SITE" not in os.environ, reason="`make docs` builds the site and runs these"),
    pytest.mark.matrix(cover=()),
    pytest.mark.time_limit(120),
]
LOADED = {"src", "srcset", "data", "poster", "action", "formaction", "background", "xlink:href"}
"""Attributes whose address a browser may load without a click."""
IN_CSS = re.compile(r"@import\s+[\"']([^\"']+)|url\(\s*[\"']?([^\"')]+)")


class Page(HTMLParser):
    """Addresses and anchors of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self._styled = False
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Read one tag."""
        self._styled = tag == "style"
        for name, value in attrs:
            if not value:
                continue
            if name in LOADED or (name == "href" and tag not in ("a", "area")):
                self.loaded.append(value)
            elif name == "href":
                self.links.append(value)
            elif name in ("id", "name"):
                self.anchors.add(value)
            elif name == "style":
                self.loaded += [one or other for one, other in IN_CSS.findall(value)]
            if name == "content" and "url=" in value.lower():
                self.loaded.append(value.lower().partition("url=")[2])

    def handle_data(self, data: str) -> None:
        """Read the text of a style sheet."""
        if self._styled:
            self.loaded += [one or other for one, other in IN_CSS.findall(data)]


@pytest.fixture(scope="module")
def pages() -> dict[Path, Page]:
    """Read every page once."""
    return {path: Page(path) for path in sorted(SITE.rglob("*.html"))}


def _is_elsewhere(address: str) -> bool:
    parts = urlsplit(address.strip())
    return bool(parts.netloc) or parts.scheme not in ("", "data")


def test_no_page_asks_another_host(pages: dict[Path, Page]) -> None:
    """Scripts, styles, fonts and pictures come from the site itself."""
    assert len(pages) > 100
    wrong = [
        f"{path.relative_to(SITE)}: {a}"
        for path, page in pages.items()
        for a in page.loaded
        if _is_elsewhere(a)
    ]
    for style in SITE.rglob("*.css"):
        text = re.sub(r"/\*.*?\*/", "", style.read_text(), flags=re.DOTALL)
        found = [one or other for one, other in IN_CSS.findall(text)]
        wrong += [f"{style.relative_to(SITE)}: {a}" for a in found if _is_elsewhere(a)]
    assert not wrong, "\n".join(wrong)


def test_links_between_pages_lead_somewhere(pages: dict[Path, Page]) -> None:
    """Every link of every page finds its file, and its anchor there."""
    wrong = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                wrong.append(f"{path.relative_to(SITE)}: {link}")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                wrong.append(f"{path.relative_to(SITE)}: {link} (no such anchor)")
    assert not wrong, "\n".join(wrong[:40])


def test_no_entry_of_the_navigation_stands_twice() -> None:
    """A page that two patterns list would."""
    course = (SITE / "docs" / "course" / "index.html").read_text()
    entries = re.findall(r'<li class="toctree-l1"><a class="reference internal" href="([^"]+)"', course)
    assert len(set(entries)) > 10
    twice = {entry for entry, times in Counter(entries).items() if times > 2}
    assert not twice, "an entry stands in the navigation and in the page's own list, once in each"


def test_notebooks_have_their_outputs() -> None:
    """Every notebook is a page with what its cells show; one that lacks a package has a line."""
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        page = (SITE / "notebooks" / notebook.stem).with_suffix(".html").read_text()
        lacks = re.search(r"\w+ is not installed, so the cells below do nothing", page)
        assert page.count("cell_output") >= (1 if lacks else 3), notebook.name


def test_search_works_without_a_server() -> None:
    """The index is a script, which a page opened as a file may load, and has the names of the API."""
    index = (SITE / "searchindex.js").read_text()
    assert index.startswith("Search.setIndex(")
    content = json.loads(index.removeprefix("Search.setIndex(").rstrip().removesuffix(")"))
    assert {"docs/index", "docs/reference/errors", "notebooks/01-hello-ranks"} <= set(content["docnames"])
    assert any("all_reduce" in title for title in content["alltitles"])


QUESTIONS = {
    "install": "get-started/install",
    "macos": "get-started/install",
    "docker": "get-started/install",
    "quickstart": "get-started/first-ten-minutes",
    "first cell": "get-started/first-ten-minutes",
    "ipyparallel": "get-started/coming-from",
    "MPI": "get-started/coming-from",
    "array is read-only": "how-to/something-is-wrong",
    "cell hangs": "how-to/something-is-wrong",
    "rank died": "how-to/something-is-wrong",
    "memory is full": "how-to/something-is-wrong",
    "too many open files": "how-to/something-is-wrong",
    "cannot be sent": "how-to/something-is-wrong",
    "share a tensor with a worker": "how-to/multiprocessing",
    "joblib": "reference/multiprocessing",
    "DistributedDataParallel": "how-to/torch",
    "deadlock": "how-to/find-a-deadlock",
    "data race": "how-to/find-a-race",
    "torchrun": "how-to/scripts",
    "several hosts": "how-to/several-hosts",
    "sharing strategy": "how-to/choose-a-strategy",
    "all_reduce": "reference/",
    "check-races": "reference/magics",
    "FileDescriptorLimitError": "reference/errors",
    "timeline": "reference/pictures",
    "performance": "explanation/performance",
    "security": "explanation/security",
}
"""What users type into the search, and the page that answers it."""
_SCORER = (ROOT / "docs" / "site" / "scorer.js").read_text()
BOOST = json.loads(_SCORER.partition("Boost = ")[2].partition(";")[0])
_COMMON = {"a", "an", "and", "be", "in", "is", "of", "the", "to"}


class Search:
    """The scores of Sphinx's own search: titles, then terms of titles, then terms of the text."""

    def __init__(self, index: dict[str, Any], stem: Callable[[str], str]) -> None:
        self.index, self.stem = index, stem

    def pages(self, query: str) -> list[str]:
        """Return the names of the pages that a query finds, best first."""
        scores: dict[int, float] = {}
        self._titles(query.lower(), scores)
        self._objects(query.lower(), scores)
        words = [word for word in re.findall(r"\w+", query.lower()) if word not in _COMMON]
        found = [self._terms(self.stem(word)) for word in words]
        for page in set.intersection(*map(set, found)) if found else ():
            scores[page] = max(scores.get(page, 0), max(by_page[page] for by_page in found))
        for page in scores:
            name = self.index["docnames"][page]
            scores[page] += sum(more for start, more in BOOST.items() if name.startswith(start))
        best = sorted(scores, key=lambda page: (-scores[page], self.index["titles"][page].lower()))
        return [self.index["docnames"][page] for page in best]

    def _titles(self, query: str, scores: dict[int, float]) -> None:
        for title, places in self.index["alltitles"].items():
            if query in title.lower() and len(query) >= len(title) / 2:
                for page, anchor in places:
                    whole = anchor is None and self.index["titles"][page] == title
                    score = round(100 * len(query) / len(title)) + whole
                    scores[page] = max(scores.get(page, 0), score)

    def _objects(self, query: str, scores: dict[int, float]) -> None:
        for objects in self.index["objects"].values():
            for page, _kind, _priority, _anchor, name in objects:
                if query == name.lower():
                    scores[page] = max(scores.get(page, 0), 11)

    def _terms(self, word: str) -> dict[int, float]:
        found: dict[int, float] = {}
        for key, exact, partial in (("terms", 5, 2), ("titleterms", 15, 7)):
            terms = self.index[key]
            matches = {word: exact} if word in terms else {}
            if not matches and len(word) > 2:
                matches = {term: partial for term in terms if word in term}
            for term, score in matches.items():
                pages = terms[term]
                for page in pages if isinstance(pages, list) else [pages]:
                    found[page] = max(found.get(page, 0), score)
        return found


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_finds_its_page(question: str) -> None:
    """The page that answers a user's question is among the first three that the search shows."""
    stemmer = pytest.importorskip("snowballstemmer").stemmer("english")
    text = (SITE / "searchindex.js").read_text()
    index = json.loads(text.removeprefix("Search.setIndex(").rstrip().removesuffix(")"))
    first = Search(index, stemmer.stemWord).pages(question)[:3]
    assert any(page.startswith(f"docs/{QUESTIONS[question]}") for page in first), first
    assert not [page for page in index["docnames"] if "/dev/" in page]
