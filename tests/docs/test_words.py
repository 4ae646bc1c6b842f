"""The language of what users read: ranks are *it*, verbs are the field's, and no idiom has to be guessed."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import nbparallel
import nbparallel.distributed
import nbparallel.errors
import nbparallel.session
import nbparallel.sharing
import nbparallel.testing
import nbparallel.testing.strategies
from nbparallel_magics.magics import ParallelMagics
from tests.architecture.source_tree import TREE

ROOT = Path(__file__).resolve().parent.parent.parent
DOORS: list[ModuleType] = [
    nbparallel,
    nbparallel.distributed,
    nbparallel.errors,
    nbparallel.session,
    nbparallel.sharing,
    nbparallel.testing,
    nbparallel.testing.strategies,
]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if "decisions" not in path.parts),
    *sorted((ROOT / "docs").rglob("*.svg")),
]
# what must not occur, and what to write instead
WORDS = {
    r"\b(who|whom|whoever|nobody|somebody|everybody|someone|everyone|anybody)\b": "a rank, no rank, all",
    r"\b(he|him|his|she|her)\b": "it, its",
    r"\blet(s|ting)? (\w+ )?go\b": "release",
    r"\bgiv(e|es|en|ing) (\w+ ){0,3}free\b": "release",
    r"\b(come|comes|came|coming) home\b": "is returned, is released",
    r"\bhear(s|d)? (that|of)\b": "is notified",
    r"\bsay(s)? that\b": "record, notify, state",
    r"\bagain is fine\b": "idempotent",
    r"\bfor ever\b": "forever, without a time limit",
    r"\bin vain\b": "for what cannot happen, without success",
    r"\bin one stroke\b": "together",
    r"\bjanitors?\b": "the supervisor, a manager process",
    r"\b(come|comes|came|coming) about\b": "was formed, happens",
    r"\bcut(s|ting)? (\w+ )?off\b": "truncate",
    r"\bmeanwhile\b": "while …, in the time between",
    r"\b(?<!all )at once\b": "immediately",
    r"\btak(e|es|en|ing) note\b": "record",
    r"\b(tell|tells|told|telling)\b": "notify, report, show, send",
    r"\bshall\b": "must, is to",
    r"\bfor good\b": "permanently",
    r"\bgiv(e|es|en|ing) (\w+ )?back\b": "return",
}
ANY = re.compile("|".join(WORDS), re.IGNORECASE)
COMMENT = re.compile(r"(?:^|  )# ?(.*)$")
"""A comment as the formatter leaves it: at the beginning of a line, or behind two spaces."""
PARAMETER = re.compile(r"^ *\w+(, \w+)* : .*$", re.MULTILINE)
"""A name of a numpydoc section, not prose."""
DOTTED = re.compile(r"\w+(\.\w+)+")
"""A module's name, not prose."""
PERSONS = re.compile(r"\b(nobody|somebody|anybody|everybody|whoever)\b", re.IGNORECASE)
CODE = re.compile(r"```.*?```|``[^`]*``|`[^`]*`|^>>> .*$", re.DOTALL | re.MULTILINE)


def offences(text: str) -> list[str]:
    """Return what of `WORDS` a text holds outside code, each with its surroundings and what to write."""
    prose = " ".join(PARAMETER.sub(" ", CODE.sub(" ", text)).split())
    found: list[str] = []
    if not ANY.search(prose):
        return found
    for pattern, instead in WORDS.items():
        for match in re.finditer(pattern, prose, re.IGNORECASE):
            around = prose[max(0, match.start() - 40) : match.end() + 30]
            found.append(f"{match[0]!r} in …{around}… (write: {instead})")
    return found


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield each public docstring once: of doors, of what they offer, of public members of our classes."""
    seen: set[int] = set()

    def documented(name: str, thing: object) -> Iterator[tuple[str, str]]:
        text = thing.__doc__
        if isinstance(text, str) and id(text) not in seen:
            seen.add(id(text))
            yield name, text

    def members(name: str, owner: type) -> Iterator[tuple[str, str]]:
        for part in owner.__mro__:
            if part.__module__.startswith("nbparallel"):
                for member, thing in vars(part).items():
                    if not member.startswith("_") or member == "__init__":
                        yield from documented(f"{name}.{member}", getattr(thing, "__func__", thing))

    for door in DOORS:
        yield from documented(door.__name__, door)
        public = getattr(door, "__all__", None) or [n for n in vars(door) if not n.startswith("_")]
        for name in public:
            thing = getattr(door, name)
            if getattr(thing, "__module__", "").startswith("nbparallel"):
                yield from documented(f"{door.__name__}.{name}", thing)
                if inspect.isclass(thing):
                    yield from members(f"{door.__name__}.{name}", thing)
    yield from members("magics", ParallelMagics)


def test_public_docstrings_use_the_field_s_words() -> None:
    """No public docstring, no magic's help holds a word of the list."""
    found = {name: bad for name, text in docstrings() if (bad := offences(text))}
    assert not found, "\n".join(f"{name}: {one}" for name, bad in found.items() for one in bad)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.exists()], ids=lambda p: str(p.relative_to(ROOT))
)
def test_pages_use_the_field_s_words(page: Path) -> None:
    """No page or picture but decisions, logs and the changelog holds a word of the list."""
    assert not (found := offences(page.read_text())), "\n".join(found)


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each comment; lines that follow each other are one."""
    block: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        comment = COMMENT.search(line)
        if comment and line.lstrip().startswith("#"):
            block.append(comment[1])
            continue
        if block:
            yield number - len(block), " ".join(block)
            block = []
        if comment:
            yield number, comment[1]


def sources() -> Iterator[tuple[str, str, ast.Module]]:
    """Yield name, text and syntax tree of each source of the library and of the benchmarks."""
    for module, path in TREE.modules.items():
        yield module, path.read_text(), TREE.trees[module]
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        text = path.read_text()
        yield str(path.relative_to(ROOT)), text, ast.parse(text)


def test_sources_use_the_field_s_words() -> None:
    """No docstring or comment, private ones too, holds a word of the list; no process is called a person."""
    found = []
    for name, text, tree in sources():
        prose = [(node.lineno, node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)]
        docs = [(n, v.value) for n, v in prose if isinstance(v, ast.Constant) and isinstance(v.value, str)]
        found += [
            f"{name}, line {n}: {bad}" for n, part in (*docs, *comments(text)) for bad in offences(part)
        ]
        found += [
            f"{name}, line {number}: {word[0]!r} (write: a process, a rank)"
            for number, line in enumerate(text.splitlines(), 1)
            for word in PERSONS.finditer(line)
        ]
    assert not found, "\n".join(found)


def test_messages_use_the_field_s_words() -> None:
    """No text that the library can print or raise holds a word of the list."""
    found = []
    for module, source in TREE.trees.items():
        prose = {id(node.value) for node in ast.walk(source) if isinstance(node, ast.Expr)}
        for node in ast.walk(source):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                found += [
                    f"{module}, line {node.lineno}: {bad}"
                    for bad in offences(node.value)
                    if not DOTTED.fullmatch(node.value)
                ]
    assert not found, "\n".join(found)
