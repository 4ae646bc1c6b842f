"""The measure itself: it must find what the rules forbid, in a small library made for it."""

from pathlib import Path

import pytest

from tests.architecture.source_tree import SourceTree, circles, floors, repeated


@pytest.fixture
def tree(tmp_path: Path) -> SourceTree:
    """Write a library of two rooms that import each other, one of them for an annotation only."""
    for name, text in {
        "nbparallel/__init__.py": "",
        "nbparallel/left/__init__.py": "",
        "nbparallel/left/base.py": "class Base: ...\nclass Middle(Base): ...",
        "nbparallel/left/top.py": "from nbparallel.left import base\nclass Top(base.Middle): ...",
        "nbparallel/right/__init__.py": "",
        "nbparallel/right/base.py": (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from nbparallel.left.top import Top\n"
            "class Base: ...\n"
        ),
        "nbparallel/left/uses.py": "def f():\n    import nbparallel.right.base",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return SourceTree(tmp_path)


def test_circles(tree: SourceTree) -> None:
    """An import inside a function and one for annotations close a circle; one room alone has none."""
    assert circles(tree.sibling_graph("nbparallel")) == [["nbparallel.left", "nbparallel.right"]]
    assert circles(tree.sibling_graph("nbparallel.left")) == []


def test_floors(tree: SourceTree) -> None:
    """The longest chain of imports counts; a circle is one floor."""
    assert floors(tree.sibling_graph("nbparallel.left")) == 2
    assert floors({"a": {"b"}, "b": {"a", "c"}, "c": set()}) == 2


def test_chains(tree: SourceTree) -> None:
    """A chain of subclasses is followed through other modules, to the class of its own module first."""
    assert tree.subclass_chains()["nbparallel.left.top.Top"] == ["Top", "Middle", "Base"]
    assert tree.subclass_chains()["nbparallel.right.base.Base"] == ["Base"]


def test_names_and_sizes(tree: SourceTree) -> None:
    """Classes of one name are found, and every entry of a folder counts, but what Python itself left."""
    assert repeated(node.name for _, node in tree.classes()) == {"Base"}
    for left in ("left/__pycache__", "left/moved/__pycache__"):
        (tree.root / "nbparallel" / left).mkdir(parents=True)
        (tree.root / "nbparallel" / left / "base.cpython-311.pyc").touch()
    assert tree.folder_sizes()["nbparallel/left"] == 4


def test_tests_and_benchmarks_are_measured(tree: SourceTree) -> None:
    """Their files and folders count, also a folder that has only folders; what they define does not."""
    for name in ("tests/deep/room/test_base.py", "benchmarks/run.py"):
        (tree.root / name).parent.mkdir(parents=True, exist_ok=True)
        (tree.root / name).write_text("class Base: ...")
    sizes = SourceTree(tree.root).folder_sizes()
    assert [sizes[name] for name in ("tests", "tests/deep", "tests/deep/room", "benchmarks")] == [1] * 4
    assert {path.name for path in SourceTree(tree.root).files} >= {"test_base.py", "run.py"}
    assert "test_base" not in " ".join(SourceTree(tree.root).modules)
