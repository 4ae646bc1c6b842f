"""Which global names a code object reads and writes, itself and in everything nested in it."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from types import CodeType

_EXTENDED_ARG = dis.opmap["EXTENDED_ARG"]
_LOAD_GLOBAL = dis.opmap["LOAD_GLOBAL"]
_READS = {
    dis.opmap[name]
    for name in ("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_NAME", "DELETE_GLOBAL")
    if name in dis.opmap
}
_STORES = {dis.opmap[name] for name in ("STORE_NAME", "DELETE_NAME")}
_STORES_GLOBAL = {dis.opmap[name] for name in ("STORE_GLOBAL", "DELETE_GLOBAL")}


def _instructions(code: CodeType) -> Iterator[tuple[int, int]]:
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


def scan(code: CodeType) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Return the globals that `code` reads, those that it writes, and all names and attributes in it.

    `code` is that of a module or a function.  A name read in a class body counts as a global even if the
    body may have bound it before: when in doubt it is one.
    """
    reads: set[str] = set()
    stores: set[str] = set()
    mentioned: set[str] = set()
    _scan(code, reads, stores, mentioned, is_module=code.co_name == "<module>")
    return frozenset(reads), frozenset(stores), frozenset(mentioned)


def _scan(code: CodeType, reads: set[str], stores: set[str], mentioned: set[str], *, is_module: bool) -> None:
    names = code.co_names
    mentioned.update(names)
    for opcode, argument in _instructions(code):
        if opcode == _LOAD_GLOBAL:
            reads.add(names[argument >> 1])  # the low bit says whether a NULL is pushed (3.11 on)
        elif opcode in _READS:
            reads.add(names[argument])
        if opcode in _STORES_GLOBAL or (is_module and opcode in _STORES):
            stores.add(names[argument])
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _scan(constant, reads, stores, mentioned, is_module=False)


@functools.lru_cache(maxsize=4096)
def function_names(code: CodeType) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """As `scan`, for a function's code, remembered."""
    return scan(code)
