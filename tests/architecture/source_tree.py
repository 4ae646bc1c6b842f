"""What the rules of the house are measured on: the library's files, classes and imports, read and never run.

``python -m tests.architecture.source_tree [CHECKOUT]`` prints the figures of a checkout.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = {"nbparallel": ".", "nbparallel_magics": "magics", "nbparallel_widgets": "widgets"}
_ROOMS = (
    "errors",
    "wire",
    "channel",
    "sharing",
    "supervisor",
    "transfer",
    "distributed",
    "engine",
    "session",
)
CORE = (*(f"nbparallel.{room}" for room in _ROOMS), "nbparallel_magics")
"""What a cell without a flag needs."""
SATELLITES = (
    "nbparallel.distributed.races",
    "nbparallel.distributed.tracing.profiling",
    "nbparallel.session.diagnostics",
)
"""Rooms that stand within the core's and are none of it."""
BESIDE = ("tests", "benchmarks")
"""Folders of Python that no user imports; the rules of sizes hold there too."""
GENERATED = {"__pycache__"}


class SourceTree:
    """The Python modules of one checkout by dotted name; a package is the module of its `__init__.py`."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.modules: dict[str, Path] = {}
        for package, folder in PACKAGES.items():
            base = root / folder
            for path in sorted((base / package).rglob("*.py")):
                parts = path.relative_to(base).with_suffix("").parts
                self.modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        """The syntax tree of each module."""
        trees = {name: ast.parse(path.read_text()) for name, path in self.modules.items()}
        gc.collect()
        gc.freeze()  # half a million objects that stay: the collections of later tests leave them out
        return trees

    def forget(self) -> None:
        """Drop the syntax trees: ranks that later tests fork copy the page tables of all that is kept."""
        self.__dict__.pop("trees", None)
        gc.unfreeze()

    @cached_property
    def packages(self) -> list[str]:
        """The dotted names that are folders."""
        return [name for name, path in self.modules.items() if path.name == "__init__.py"]

    def children(self, package: str) -> list[str]:
        """Return the dotted names directly below a package."""
        return [name for name in self.modules if name.rpartition(".")[0] == package]

    @cached_property
    def files(self) -> list[Path]:
        """Every Python file: of the library, the tests and the benchmarks."""
        beside = [path for folder in BESIDE for path in sorted((self.root / folder).rglob("*.py"))]
        return [*self.modules.values(), *beside]

    def folder_sizes(self) -> dict[str, int]:
        """Return how many entries each folder has, that of tests and of benchmarks among them."""
        folders = {path.parent for path in self.files}
        for top in (self.root / name for name in BESIDE):
            folders |= {above for path in folders for above in path.parents if above.is_relative_to(top)}
        return {
            str(folder.relative_to(self.root)): sum(map(_is_kept, folder.iterdir()))
            for folder in sorted(folders)
        }

    # classes ------------------------------------------------------------------------------------------------

    def classes(self) -> Iterator[tuple[str, ast.ClassDef]]:
        """Yield (module, class) of every class that stands at a module's top level."""
        for module, tree in self.trees.items():
            yield from ((module, node) for node in tree.body if isinstance(node, ast.ClassDef))

    def subclass_chains(self) -> dict[str, list[str]]:
        """Return for each class its longest chain of bases that are ours, the class itself first."""
        where: dict[str, list[tuple[str, ast.ClassDef]]] = defaultdict(list)
        for module, node in self.classes():
            where[node.name].append((module, node))

        def chain(module: str, node: ast.ClassDef) -> list[str]:
            longest: list[str] = []
            for base in node.bases:
                name = ast.unparse(base).split("[")[0].rpartition(".")[2]
                homes = [home for home in where[name] if home[0] == module] or where[name]
                if name.startswith("_"):  # private: of this module, or imported from a neighbour
                    homes = homes[:1]
                for home in homes:
                    if home[1] is not node:
                        longest = max(longest, chain(*home), key=len)
            return [node.name, *longest]

        return {f"{module}.{node.name}": chain(module, node) for module, node in self.classes()}

    # imports ------------------------------------------------------------------------------------------------

    def imports(self, module: str) -> set[str]:
        """Return the modules of ours that one imports: anywhere in its text, for annotations too."""
        found: set[str] = set()
        for node in ast.walk(self.trees[module]):
            if isinstance(node, ast.Import):
                found.update(self._existing(alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.update(self._existing(f"{node.module}.{alias.name}") for alias in node.names)
        return found - {"", module}

    def _existing(self, name: str) -> str:
        while name and name not in self.modules:
            name = name.rpartition(".")[0]
        return name

    def sibling_graph(self, package: str) -> dict[str, set[str]]:
        """Return which children of a package import which; the package's own `__init__` is left out."""
        graph: dict[str, set[str]] = {child: set() for child in self.children(package)}
        depth = package.count(".") + 2
        for module in self.modules:
            if module.startswith(package + "."):
                here = ".".join(module.split(".")[:depth])
                for target in self.imports(module):
                    there = ".".join(target.split(".")[:depth])
                    if there in graph and there != here:
                        graph[here].add(there)
        return graph


def _is_kept(entry: Path) -> bool:
    """Tell whether a folder's entry is more than what Python left of sources that were moved away."""
    if entry.is_dir():
        return entry.name not in GENERATED and any(map(_is_kept, entry.iterdir()))
    return True


TREE = SourceTree()
"""This checkout, read once in a process."""


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of nodes that reach each other (more than one node each)."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        todo = list(graph[start])
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo.extend(graph[node])
        return seen

    reached = {node: reach(node) for node in graph}
    groups = {tuple(sorted(o for o in reached[n] if n in reached[o])) for n in graph if n in reached[n]}
    return sorted([*group] for group in groups)


def floors(graph: dict[str, set[str]]) -> int:
    """Return the length of the longest chain of imports, a circle counted as one floor."""
    owner = {node: node for node in graph}
    for group in circles(graph):
        owner.update(dict.fromkeys(group, group[0]))
    merged: dict[str, set[str]] = defaultdict(set)
    for node, targets in graph.items():
        merged[owner[node]] |= {owner[t] for t in targets} - {owner[node]}
    height: dict[str, int] = {}

    def measure(node: str) -> int:
        if node not in height:
            height[node] = 1 + max((measure(target) for target in merged[node]), default=0)
        return height[node]

    return max(map(measure, list(merged)), default=0)


def repeated(names: Iterable[str]) -> set[str]:
    """Return the names that occur more than once."""
    return {name for name, count in Counter(names).items() if count > 1}


def statements(paths: Iterable[Path]) -> int:
    """Return how many statements run: docstrings are none."""
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    return sum(isinstance(node, ast.stmt) and not _is_text(node) for node in nodes)


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def masses(tree: SourceTree) -> dict[str, tuple[int, int, int]]:
    """Return lines, statements and files of the library, of its core, of its satellites, and of the tests."""

    def is_core(name: str) -> bool:
        return name.startswith(CORE) and not name.startswith(SATELLITES)

    tests = [path for path in tree.files if path.is_relative_to(tree.root / "tests")]
    rooms = {
        "library": [*tree.modules.values()],
        "core": [path for name, path in tree.modules.items() if is_core(name)],
        "satellites": [path for name, path in tree.modules.items() if not is_core(name)],
        "tests": tests,
    }
    return {
        room: (sum(len(path.read_text().splitlines()) for path in paths), statements(paths), len(paths))
        for room, paths in rooms.items()
    }


def _lines(paths: Iterable[Path]) -> str:
    counts = [len(path.read_text().splitlines()) for path in paths]
    return f"{len(counts)} files, {sum(counts)} lines"


def _print_figures(tree: SourceTree) -> None:
    package = "nbparallel.distributed"
    inside = [name for name in tree.modules if name.startswith(package + ".")]
    names = [node.name for _, node in tree.classes() if not node.name.startswith("_")]
    sizes = tree.folder_sizes()
    largest = max(sizes, key=lambda folder: sizes[folder])
    for room, (lines, count, files) in masses(tree).items():
        print(f"{room}: {lines} lines, {count} statements, {files} files")
    print("benchmarks:", _lines((tree.root / "benchmarks").rglob("*.py")))
    print(f"largest folder: {largest}, {sizes[largest]} entries")
    everything = {name: tree.imports(name) & set(inside) for name in inside}
    print(f"distributed: {len(tree.children(package)) + 1} entries", end=", ")
    print(f"{floors(everything)} floors of files, {floors(tree.sibling_graph(package))} of entries")
    print("circles of siblings:", sum(len(circles(tree.sibling_graph(name))) for name in tree.packages))
    print("public class names that occur twice:", len(repeated(names)))
    print("longest chain of subclasses:", max(map(len, tree.subclass_chains().values())) - 1)


if __name__ == "__main__":
    from tests.architecture.walks import print_walks

    _print_figures(SourceTree(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT))
    print_walks()
