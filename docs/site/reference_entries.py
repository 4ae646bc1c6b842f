"""What the reference of magics and configuration says, read from their parsers and traits."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass

from nbparallel_magics import flags
from nbparallel_magics.arguments import MagicParser
from nbparallel_magics.state import NbParallel


@dataclass(frozen=True, slots=True)
class FlagEntry:
    """One flag or word of a magic's line."""

    anchor: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class MagicEntry:
    """One magic: what it does, an example, and its flags."""

    anchor: str
    title: str
    text: str
    example: str
    flags: tuple[FlagEntry, ...]
    """Those that no earlier magic has."""
    shared: tuple[FlagEntry, ...]
    """Those that are described at an earlier magic."""


def magic_entries() -> Iterator[MagicEntry]:
    """Yield every magic; a flag that several magics have is described at the first of them."""
    described: dict[tuple[str, str], FlagEntry] = {}
    for parser in vars(flags).values():
        if not isinstance(parser, MagicParser):
            continue
        kind = "cell" if parser.prog.startswith("%%") else "line"
        anchor = f"{kind}-{parser.prog.lstrip('%').replace('_', '-')}"
        own, shared = [], []
        for action in parser._actions:
            if action.help in (None, argparse.SUPPRESS):
                continue
            entry = _flag(action, anchor)
            earlier = described.setdefault((entry.title, entry.text), entry)
            (own if earlier is entry else shared).append(earlier)
        example = (parser.epilog or "").partition("\n\n")[2]
        text = " ".join(str(parser.description).split())
        yield MagicEntry(
            anchor,
            parser.prog,
            text,
            "\n".join(line.removeprefix("    ") for line in example.splitlines()),
            tuple(own),
            tuple(shared),
        )


def _flag(action: argparse.Action, magic: str) -> FlagEntry:
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else "")
    names = action.option_strings or [str(action.metavar or action.dest)]
    title = ", ".join(names)
    if action.option_strings and action.nargs != 0 and value:
        title += f" {value}"
    text = str(action.help) % {"default": action.default, "prog": ""}
    slug = re.sub(r"\W+", "-", names[-1].lower()).strip("-")
    return FlagEntry(f"{magic}-{slug}", title, text[:1].upper() + text[1:])


def configuration_rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield name, kind, default and help of every option of ``%config NbParallel``."""
    for name, trait in sorted(NbParallel.class_own_traits(config=True).items()):
        yield name, trait.info(), repr(trait.default_value), " ".join(str(trait.help).split())
