"""Which global names a code object reads and writes, itself and in everything nested in it."""

from __future__ import annotations

import dis
import functools
import inspect
import re
import warnings
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from types import CodeType

_EXTENDED_ARG = dis.opmap["EXTENDED_ARG"]
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
_BY_NAME = frozenset((
    "__main__", "cProfile", "eval", "evaluate", "exec", "globals", "locals", "pdb", "run_line_magic", "sql",
    "timeit", "user_ns", "vars",
))  # fmt: skip
"""What code mentions that looks names up in strings: they are called, imported, or libraries' methods."""
_WORD = re.compile(r"[A-Za-z_]\w*")
_SCRIPT = re.compile(r"[^\s'\"]+\.py\b")
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
    """Every name and attribute in it."""
    words: set[str] = field(default_factory=set)
    """Every word in its strings."""
    scripts: set[str] = field(default_factory=set)
    """Every file name in them that ends in ``.py``."""


def looks_up_strings(mentioned: Set[str], words: Set[str]) -> bool:
    """Whether code that mentions these names may take words in its strings for names."""
    return not _BY_NAME.isdisjoint(mentioned) or "__main__" in words


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
    for opcode, argument in instructions(code):
        if opcode == _LOAD_GLOBAL:
            reads.add(names[argument >> 1])  # the low bit: whether a NULL is pushed (3.11 on)
        elif opcode in _READS:
            reads.add(names[argument])
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
        if ".py" in text:
            found.scripts.update(_SCRIPT.findall(text))


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
