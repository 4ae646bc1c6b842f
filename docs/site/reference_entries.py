"""What the reference of magics and configuration says, read from their parsers and traits."""

from __future__ import annotations

from collections.abc import Iterator

from nbparallel_magics import flags
from nbparallel_magics.arguments import MagicParser
from nbparallel_magics.configuration import NbParallel


def magic_sections() -> Iterator[tuple[str, str, str]]:
    """Yield anchor, title and help of every magic: ``cell-parallel``, ``%%parallel``, its flags."""
    for parser in vars(flags).values():
        if isinstance(parser, MagicParser):
            kind = "cell" if parser.prog.startswith("%%") else "line"
            anchor = f"{kind}-{parser.prog.lstrip('%').replace('_', '-')}"
            yield anchor, parser.prog, parser.format_help().rstrip()


def configuration_rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield name, kind, default and help of every option of ``%config NbParallel``."""
    for name, trait in sorted(NbParallel.class_own_traits(config=True).items()):
        yield name, trait.info(), repr(trait.default_value), " ".join(str(trait.help).split())
