"""The site without building it: every page is in the navigation, links lead somewhere, nothing lacks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import nbparallel
import nbparallel.distributed as dist
from docs.site import name_examples, page_source, sections
from docs.site.reference_entries import configuration_rows, magic_entries
from nbparallel import errors
from nbparallel_magics.magics import ParallelMagics
from nbparallel_magics.state import NbParallel

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = {
    str(path.relative_to(ROOT).with_suffix("")): path
    for path in [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md")),
        *(ROOT / "notebooks").glob("*.md"),
    ]
    if "dev" not in path.parts
}
REFERENCE = ROOT / "docs" / "reference"
FOR_SESSIONS = {"Communicator", "call_with_rank", "current", "set_current"}
"""Names of `nbparallel.distributed` by which a session sets a rank up; the page says so."""
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def _prose(text: str) -> str:
    return re.sub(r"`[^`\n]*`", lambda code: "x" * len(code[0]), _FENCE.sub("", text))


def _anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found: dict[str, int] = {}
    anchors = set()
    for heading in re.findall(r"^#{1,6} (.*)$", _FENCE.sub("", text), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        anchors.add(f"{slug}-{found[slug]}" if slug in found else slug)
        found[slug] = found.get(slug, 0) + 1
    return anchors


def _links() -> Iterator[tuple[str, Path, str]]:
    """Yield (where, page, link) of all pages, the README's and those of notebooks."""
    for path in [
        *PAGES.values(),
        ROOT / "README.md",
        *(ROOT / "notebooks").glob("*.md"),
        *(ROOT / "docs" / "dev").rglob("*.md"),
        *(ROOT / "tests" / "faults").rglob("*.md"),
        *(ROOT / "benchmarks" / "results").glob("*.md"),
    ]:
        for link in _LINK.findall(_prose(path.read_text())):
            yield str(path.relative_to(ROOT)), path, link
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "markdown":
                for link in _LINK.findall(_prose("".join(cell["source"]))):
                    yield str(path.relative_to(ROOT)), path, link


def test_links_and_anchors_lead_somewhere() -> None:
    """A link's file exists, and so does the heading that it names; outside links are well formed."""
    wrong, seen = [], 0
    for where, page, link in _links():
        seen += 1
        parts = urlsplit(link)
        if parts.scheme:
            if parts.scheme != "https" or not re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc):
                wrong.append(f"{where}: {link} is no https address")
            continue
        target = (page.parent / parts.path).resolve() if parts.path else page
        if not target.exists():
            wrong.append(f"{where}: {link} is not there")
        elif parts.fragment and target.suffix == ".md" and parts.fragment not in _anchors(target.read_text()):
            wrong.append(f"{where}: {target.name} has no heading {parts.fragment!r}")
    assert seen > 80
    assert not wrong, "\n".join(wrong)


def test_every_page_is_in_the_navigation() -> None:
    """Sections list every page once, and no other; notebooks come by pattern."""
    listed = [
        page
        for section in sections.SECTIONS
        for page in sections.pages_of(PAGES[section].read_text(), section)
    ]
    assert len(listed) == len(set(listed))
    front = sections.pages_of(PAGES["docs/index"].read_text(), "docs/index")
    assert front == [], "the front page has sections, not pages"
    expected = {*PAGES} - {*sections.SECTIONS, "docs/index"}
    assert {page.removesuffix(".md") for page in listed} == expected
    assert "every file of ../../notebooks/*.ipynb" in PAGES["docs/course/index"].read_text()


def _listed(page: str) -> set[str]:
    blocks = re.findall(r"\.\. autosummary::\n((?:   .*\n|\n)+)", (REFERENCE / page).read_text())
    return {line.strip() for block in blocks for line in block.splitlines() if line.strip()[:1].isalpha()} | {
        line.strip() for block in blocks for line in block.splitlines() if re.fullmatch(r"   [A-Z_]+", line)
    }


def test_every_public_name_has_a_page() -> None:
    """What `__all__` lists is what the reference lists, and `map`, which is left out of `__all__`."""
    assert _listed("python.md") == {*nbparallel.__all__, "map"}
    assert _listed("distributed.md") == {*dist.__all__} - FOR_SESSIONS
    apart = "".join(
        (REFERENCE / page).read_text().partition("## Names that programs do not need")[2]
        for page in ("python.md", "distributed.md")
    )
    assert set(re.findall(r"`([\w.]+)`", apart)) >= FOR_SESSIONS | page_source.INTERNAL
    for name in page_source.INTERNAL:
        owner, _, member = name.partition(".")
        assert hasattr(getattr(dist, owner, None) or getattr(nbparallel, owner), member), name


def test_every_public_name_has_an_example_that_runs() -> None:
    """A cell of the page of examples uses each name; none of its cells is left out when examples run."""
    page = name_examples.PAGE.read_text()
    assert "exec=" not in page
    elsewhere = {"register_sharing_strategy"}  # has a page of its own, whose cells run
    names = {*nbparallel.__all__, "map", *dist.__all__} - FOR_SESSIONS - elsewhere
    assert {name for name in names if not name_examples.example_of(name, page)} == set()
    assert name_examples.example_of("send_nothing", page) == ""


def test_every_error_has_cause_and_cure() -> None:
    """The page of errors has a section for each class, and no other, with what it is as a builtin."""
    text = _FENCE.sub("", (REFERENCE / "errors.md").read_text())
    parts = re.split(r"^### (.*)$", text, flags=re.MULTILINE)[1:]
    described = dict(zip(parts[::2], parts[1::2], strict=True))
    classes = {
        name: thing
        for name, thing in vars(errors).items()
        if isinstance(thing, type) and name.endswith("Error")
    }
    assert set(described) == set(classes)
    for name, body in described.items():
        if name != "NbParallelError":
            assert "**Cause**:" in body, name
            assert "**Cure**:" in body, name
            assert any(f"`{base.__name__}`" in body for base in classes[name].__mro__[1:]), name
    builtins = {name: re.findall(r"`(\w+)`", body.partition(".")[0]) for name, body in described.items()}
    for name, said in builtins.items():
        assert said, name
        assert {*said} <= {base.__name__ for base in classes[name].__mro__}, name


def test_every_magic_and_option_is_on_its_page() -> None:
    """The directives write a section for every magic that is registered and every trait that can be set."""
    registered = {
        *(f"%{name}" for name in ParallelMagics.magics["line"] if not name.startswith("%")),
        *(f"%%{name}" for name in ParallelMagics.magics["cell"]),
    }
    found = list(magic_entries())
    assert {magic.title for magic in found} == registered
    anchors = [entry.anchor for magic in found for entry in (magic, *magic.flags)]
    assert len(set(anchors)) == len(anchors)
    assert "cell-parallel-check-races" in anchors, "a flag can be linked to"
    assert all(magic.text and magic.example for magic in found)
    assert {flag.anchor for magic in found for flag in magic.shared} <= set(anchors)
    page = (REFERENCE / "magics.md").read_text()
    assert [magic.title for magic in found if f"`{magic.title}" not in page] == []
    assert "```{magics}" in page
    options = list(configuration_rows())
    assert {name for name, *_ in options} == set(NbParallel.class_own_traits(config=True))
    assert all(text for *_, text in options)
    assert "```{configuration}" in (REFERENCE / "configuration.md").read_text()
