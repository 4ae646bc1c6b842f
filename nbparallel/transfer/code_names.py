"""Which global names a code object reads and writes, itself and in everything nested in it."""

from __future__ import annotations

import dis
import functools
import inspect
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType

_EXTENDED_ARG = dis.opmap["EXTENDED_ARG"]
_CACHE = dis.opmap["CACHE"]
_LOAD_GLOBAL = dis.opmap["LOAD_GLOBAL"]
_READS = {
    dis.opmap[name]
    for name in ("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_NAME", "DELETE_GLOBAL")
    if name in dis.opmap
}
_STORES = {dis.opmap["STORE_NAME"], dis.opmap["DELETE_NAME"]}
_STORES_GLOBAL = {dis.opmap["STORE_GLOBAL"], dis.opmap["DELETE_GLOBAL"]}
_FRAME_METHODS = frozenset({"query", "eval"})
"""Methods of pandas' frames to which ``@name`` in a string is a variable."""
_AT_NAME = re.compile(r"@([A-Za-z_]\w*)")
_EVALUATED = frozenset({"eval", "exec"})
_ATTRIBUTES = {dis.opmap[name] for name in ("LOAD_ATTR", "LOAD_METHOD") if name in dis.opmap}
_SHIFTED = {dis.opmap["LOAD_ATTR"]} if sys.version_info >= (3, 12) else set()
"""Their argument's low bit says whether it is a method's call."""
_LOCALS = {
    dis.opmap[name]: (stores, loads, pair)
    for name, stores, loads, pair in (
        ("STORE_FAST", True, False, False), ("LOAD_FAST", False, True, False),
        ("LOAD_FAST_BORROW", False, True, False), ("STORE_FAST_LOAD_FAST", True, True, True),
    )
    if name in dis.opmap
}  # fmt: skip
"""Whether they store and load a local name; a pair's two lie in one argument (3.13 on)."""
_IMPORTED = "import"
"""No name: what stands in place of one behind an import."""
_IMPORT_NAME = dis.opmap["IMPORT_NAME"]
_IMPORTS = {_IMPORT_NAME, dis.opmap["IMPORT_FROM"]}
_BY_NAME = frozenset(("cProfile", "eval", "exec", "globals", "locals", "pdb", "timeit", "vars"))
"""Names that look names up in strings where code reads or imports them."""
_OF_MODULES = frozenset(("eval", "evaluate", "sql", "timeit"))
"""Functions of libraries that do: an object may have a method of that name that does not."""
_FUNCTIONS = _BY_NAME | _OF_MODULES
_ANYWHERE = frozenset(("__main__", "user_ns", ".sql"))
"""Whatever they are attributes of."""
_WORD = re.compile(r"[A-Za-z_]\w*")
_MOST_TEXT = 4000
"""Characters of a string that is looked at as code, at most."""


@dataclass(slots=True)
class CodeNames:
    """The names of one code object and of all that is nested in it."""

    reads: set[str] = field(default_factory=set)
    """Globals that it reads (or deletes)."""
    doubtful: set[str] = field(default_factory=set)
    """Names that a class body reads and also binds: globals only if the binding comes later.  And names in
    strings, where the code calls what evaluates strings."""
    stores: set[str] = field(default_factory=set)
    """Globals that it binds or deletes."""
    mentioned: set[str] = field(default_factory=set)
    """Every name and attribute in it.  And ``pd.eval``, ``.globals``: what may look up names in strings."""
    words: set[str] = field(default_factory=set)
    """Every word in its strings."""
    modules: set[str] = field(default_factory=set)
    """Names of modules that it imports."""


def looks_up_strings(mentioned: Set[str], words: Set[str], namespace: Mapping[str, object]) -> bool:
    """Whether code that mentions these names may take words in its strings for names."""
    if not _ANYWHERE.isdisjoint(mentioned) or "__main__" in words:
        return True
    if "run_line_magic" in mentioned and "run" in words:
        return True
    return any(_is_librarys(mark, namespace) for mark in mentioned if "." in mark)


def _is_librarys(mark: str, namespace: Mapping[str, object]) -> bool:
    """Whether ``owner.name`` is a function of a module, ``.name`` not a name of the notebook's own."""
    owner, _, name = mark.partition(".")
    if (owner or name) not in namespace:
        return not owner
    value = namespace[owner or name]
    if isinstance(value, ModuleType):
        return owner != name
    is_function = owner in ("", name) and isinstance(value, BuiltinFunctionType | FunctionType)
    return is_function and value.__module__ != "__main__"


def instructions(code: CodeType) -> Iterator[tuple[int, int]]:
    """Yield (opcode, argument); `dis` does the same, an order of magnitude slower."""
    raw = code.co_code  # never specialised; inline caches are zeros
    extended = 0
    for index in range(0, len(raw), 2):
        opcode, argument = raw[index], raw[index + 1] | extended
        if opcode == _EXTENDED_ARG:
            extended = argument << 8
            continue
        extended = 0
        yield opcode, argument


def scan(code: CodeType) -> CodeNames:
    """Return the names of a module's or a function's code."""
    found = CodeNames()
    _scan(code, found)
    return found


def _scan(code: CodeType, found: CodeNames) -> None:
    names = code.co_names
    reads: set[str] = set()
    stores: set[str] = set()
    found.mentioned.update(names)
    former = owner = ""
    for opcode, argument in instructions(code):
        if opcode == _CACHE:
            continue
        former, owner = owner, ""
        if opcode == _LOAD_GLOBAL:
            owner = names[argument >> 1]  # the low bit: whether a NULL is pushed (3.11 on)
            reads.add(owner)
        elif opcode in _READS:
            owner = names[argument]
            reads.add(owner)
        elif opcode in _IMPORTS:
            owner = _IMPORTED
            lazy = sys.version_info >= (3, 15) and opcode == _IMPORT_NAME  # two bits say whether it is
            number = argument >> 2 if lazy else argument
            found.mentioned.update("." + name for name in names[number : number + 1] if name in _FUNCTIONS)
        elif opcode in _ATTRIBUTES:
            name = names[argument >> 1 if opcode in _SHIFTED else argument]
            if name == "sql":
                found.mentioned.add(".sql")
            elif name in _OF_MODULES and former:
                found.mentioned.add(("" if former in found.modules else former) + "." + name)
        elif former == _IMPORTED and opcode in _STORES | _STORES_GLOBAL:
            found.modules.add(names[argument])
        elif opcode in _LOCALS:
            stored, loaded, pair = _LOCALS[opcode]
            first, last = divmod(argument, 16) if pair else (argument, argument)
            if stored and former == _IMPORTED:
                found.modules.add(code.co_varnames[first])
            if loaded and last < len(code.co_varnames) and code.co_varnames[last] in found.modules:
                owner = code.co_varnames[last]
        if opcode in _STORES:
            stores.add(names[argument])
        elif opcode in _STORES_GLOBAL:
            found.stores.add(names[argument])
    if code.co_name == "<module>":
        found.stores |= stores
    elif not code.co_flags & inspect.CO_OPTIMIZED:  # a class body: what it binds is its own
        found.doubtful |= reads & stores
        reads -= stores
    found.reads |= reads
    found.mentioned.update("." + name for name in reads & _BY_NAME)
    found.mentioned.update(f"{name}.{name}" for name in reads & _OF_MODULES - _BY_NAME)
    in_frames, evaluates = not _FRAME_METHODS.isdisjoint(names), not _EVALUATED.isdisjoint(reads)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _scan(constant, found)
        elif isinstance(constant, str):
            _scan_text(constant, found)
            if in_frames:
                found.doubtful.update(_AT_NAME.findall(constant))
            if evaluates:
                found.doubtful |= _names_in_text(constant)
        elif isinstance(constant, tuple | frozenset):
            for part in constant:
                if isinstance(part, str):
                    _scan_text(part, found)


def _scan_text(text: str, found: CodeNames) -> None:
    if len(text) <= _MOST_TEXT:
        found.words.update(_WORD.findall(text))


def _names_in_text(text: str) -> set[str]:
    """Return the names that a string reads as Python; none of one that is a single word, or no Python."""
    if text.isidentifier() or len(text) > _MOST_TEXT:
        return set()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a string that may be no code at all
            return scan(compile(text.strip(), "<text>", "exec", dont_inherit=True)).reads
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()


@functools.lru_cache(maxsize=4096)
def function_names(code: CodeType) -> CodeNames:
    """As `scan`, for a function's code, remembered: do not change what it returns."""
    return scan(code)
