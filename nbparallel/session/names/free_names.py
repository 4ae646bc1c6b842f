"""Free names: what a cell may need from the notebook.

The cell is compiled, after IPython's input transformation if it is not plain Python, and the names are read
off its code.  Magics hide code in strings: that of ``%time``, ``%%timeit`` and so on is analysed as well,
in the others (and in shell commands) ``{expression}``, ``$name`` and plain words count as doubtful names.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, NamedTuple

from nbparallel.transfer.code_names import scan

# Which names a cell may change in place: read off its syntax, not certain.


class MutationHints(NamedTuple):
    """Names by how a cell may change what they are bound to."""

    touched: frozenset[str]
    """It assigns to items or attributes, as ``d["a"].b = 1`` or ``del d[0]``, or calls a method."""
    augmented: frozenset[str]
    """It assigns as ``d += 1`` does, and in no other way."""
    deleted: frozenset[str]
    """It deletes the name, and does not bind it."""


def find_mutation_hints(tree: ast.Module) -> MutationHints:
    """Return the names that a cell may change in place; those of its functions count as globals."""
    touched: set[str] = set()
    augmented: set[str] = set()
    bound: set[str] = set()
    deleted: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del()):
                touched.add(_root(node))
            case ast.Call(func=ast.Attribute() as method):
                touched.add(_root(method))
            case ast.AugAssign(target=ast.Name(id=name) as target):
                augmented.add(name)
                target.ctx = _AUGMENTED
            case ast.Name(id=name, ctx=ast.Store()) if node.ctx is not _AUGMENTED:
                bound.add(name)
            case ast.Name(id=name, ctx=ast.Del()):
                deleted.add(name)
    return MutationHints(
        frozenset(touched),
        frozenset(augmented - bound),
        frozenset(deleted - bound - augmented),
    )


_AUGMENTED = ast.Store()


def _root(node: ast.expr) -> str:
    """Return the name that a chain of attributes and items begins with; empty: it begins with no name."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_PYTHON_MAGICS = frozenset(
    {"time", "timeit", "prun", "capture", "debug", "memit", "mprun", "lprun", "snakeviz"}
)
"""Magics whose argument or body is Python that runs in the user's namespace."""
_OPTIONS = re.compile(r"\s*(?:-\w+(?:[= ]?\d+)?\s+)+")
"""Leading options of a magic: ``-n 10 -r3 -o``."""
_BRACES = re.compile(r"\{([^{}]+)\}")
_WORD = re.compile(r"[A-Za-z_]\w*")
_OWN = re.compile(r"_{1,3}|_\d+|_i+|_i\d+|_(?:dh|ih|oh|sh|exit_code)|__\w+__")
_IPYTHON = frozenset({"In", "Out", "get_ipython", "exit", "quit"})


@dataclass(frozen=True, slots=True)
class FreeNames:
    """The names of one cell."""

    needed: frozenset[str]
    """Read and never bound by the cell."""
    doubtful: frozenset[str]
    """Read, perhaps before the cell binds them, or only mentioned in a magic's argument."""
    assigned: frozenset[str]
    """Bound or deleted by the cell."""
    mentioned: frozenset[str]
    """All names and attributes in it."""
    changed: MutationHints
    """What it may change in place."""
    words: frozenset[str] = frozenset()
    """Words in its strings."""

    def with_drawn(self, names: Iterable[str]) -> FreeNames:
        """Return these names and those whose values are drawn, as if the cell looked at them first."""
        drawn = {name for name in names if not is_ipythons(name)}
        return replace(self, doubtful=self.doubtful | (drawn - self.needed - self.assigned))


@functools.lru_cache(maxsize=4096)
def is_ipythons(name: str) -> bool:
    """Whether a name is IPython's own (history, results, ``exit`` …) and never travels."""
    return name in _IPYTHON or _OWN.fullmatch(name) is not None


def is_ipythons_function(name: str, value: object) -> bool:
    """Whether a value is the function that IPython itself puts under a name: every rank has its own."""
    if name != "open" or not isinstance(value, FunctionType):
        return False
    return value.__globals__.get("__name__") == "IPython.core.interactiveshell"  # it wraps Python's own


@functools.lru_cache(maxsize=256)
def find_free_names(source: str) -> FreeNames:
    """Return the free names of a cell; they need not exist.

    Raises
    ------
    SyntaxError
        The cell does not compile.
    """
    tree = _parse(source)
    total = scan(compile(tree, "<cell>", "exec", flags=_FLAGS, dont_inherit=True))
    visitor = _Magics()
    if "get_ipython" in total.reads:
        visitor.visit(tree)
    magics = visitor.found
    unbound = _read_before_bound(tree.body, set())
    assigned = total.stores | magics["assigned"]
    needed = (unbound - assigned) | (magics["needed"] - total.stores)
    doubtful = unbound | total.doubtful | magics["doubtful"] | magics["needed"]
    return FreeNames(
        needed=frozenset(name for name in needed if not is_ipythons(name)),
        doubtful=frozenset(name for name in doubtful - needed if not is_ipythons(name)),
        assigned=frozenset(assigned),
        mentioned=frozenset(total.mentioned | magics["mentioned"]),
        changed=find_mutation_hints(tree),
        words=frozenset(total.words | magics["words"]),
    )


def _parse(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError:
        # imported here: most cells are plain Python, and scripts need no IPython for them
        from IPython.core.inputtransformer2 import TransformerManager

        manager: Any = TransformerManager  # IPython's class has no annotations
        plain: str = manager().transform_cell(source)
        return ast.parse(plain)


def _read_before_bound(statements: list[ast.stmt], bound: set[str], *, inside: bool = False) -> set[str]:
    """Return the names that some statement reads although none before it has certainly bound them.

    Parameters
    ----------
    bound : set of str
        Names that are bound before the first statement; those that the statements bind are added.
    inside : bool, default False
        The statements are a block of others, perhaps of a loop.
    """
    unbound: set[str] = set()
    for statement in statements:
        match statement:
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                unbound |= _reads(_emptied(statement), inside) - bound
                bound.update(*(_targets(item.optional_vars) for item in items if item.optional_vars))
                unbound |= _read_before_bound(body, set(bound), inside=True)
            case (
                ast.For(target=target, body=body, orelse=rest)
                | ast.AsyncFor(target=target, body=body, orelse=rest)
            ):
                unbound |= _reads(_emptied(statement), inside) - bound
                unbound |= _read_before_bound(body, bound.union(_targets(target)), inside=True)
                unbound |= _read_before_bound(rest, set(bound), inside=True)
            case _:
                unbound |= _reads(statement, inside) - bound
                bound.update(_certainly_bound(statement))
        if isinstance(statement, ast.Delete):
            bound -= {target.id for target in statement.targets if isinstance(target, ast.Name)}
    return unbound


def _reads(statement: ast.stmt, inside: bool) -> Set[str]:
    """Return the names that a statement reads; a statement from inside a loop may be a `break`."""
    if inside:
        statement = ast.copy_location(ast.While(ast.Constant(True), [statement], []), statement)
    module = ast.fix_missing_locations(ast.Module([statement], []))
    return scan(compile(module, "<cell>", "exec", flags=_FLAGS, dont_inherit=True)).reads


def _emptied(statement: ast.stmt) -> ast.stmt:
    """Return a compound statement with nothing in its blocks: what is read before the first of them."""
    blocks: dict[str, list[ast.stmt]] = {"body": [ast.Pass()], "orelse": []}
    fields = {**dict(ast.iter_fields(statement)), **blocks}
    return ast.copy_location(type(statement)(**{name: fields[name] for name in statement._fields}), statement)


def _certainly_bound(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that are bound once `statement` has run without an error."""
    match statement:
        case ast.Assign(targets=targets):
            for target in targets:
                yield from _targets(target)
        case ast.AnnAssign(target=ast.Name(id=name), value=value) if value is not None:
            yield name
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            for alias in aliases:
                yield (alias.asname or alias.name).partition(".")[0]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name


def _targets(target: ast.expr) -> Iterator[str]:
    match target:
        case ast.Name(id=name):
            yield name
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from _targets(part)
        case ast.Starred(value=part):
            yield from _targets(part)


class _Magics(ast.NodeVisitor):
    """Collects names from the calls that IPython's transformation makes of magics and commands."""

    def __init__(self) -> None:
        self.found: defaultdict[str, set[str]] = defaultdict(set)
        """By a field of `FreeNames`."""

    def visit_Call(self, node: ast.Call) -> None:
        """Visit ``get_ipython().something("…")``, and the inside of every other call."""
        match node.func:
            case ast.Attribute(attr=method, value=ast.Call(func=ast.Name(id="get_ipython"))):
                arguments = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
                self._take(method, [text for text in arguments if isinstance(text, str)])
        self.generic_visit(node)

    def _take(self, method: str, texts: list[str]) -> None:
        if method in ("run_line_magic", "run_cell_magic") and texts:
            name, *texts = texts
            if name in _PYTHON_MAGICS:
                for text in texts:
                    self._take_python(text)
                return
            if method == "run_cell_magic":
                texts = texts[:1]  # the body is another language's, or a file's
            for text in texts:
                self.found["doubtful"].update(_WORD.findall(text))
        if method in ("run_line_magic", "run_cell_magic", "system", "getoutput"):
            for text in texts:
                self._take_expansions(text)

    def _take_python(self, text: str) -> None:
        for part in {text, _OPTIONS.sub("", text, count=1)}:
            try:
                found = find_free_names(part)
            except SyntaxError:
                self._take_expansions(text)
                continue
            for field in ("needed", "doubtful", "assigned", "mentioned", "words"):
                self.found[field] |= getattr(found, field)

    def _take_expansions(self, text: str) -> None:
        self.found["doubtful"].update(re.findall(r"\$\{?([A-Za-z_]\w*)", text))
        for expression in _BRACES.findall(text):
            try:
                self.found["doubtful"] |= find_free_names(expression.partition(":")[0].strip()).needed
            except SyntaxError:
                continue
