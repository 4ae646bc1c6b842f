"""Loading and unloading the extension in an IPython shell."""

from __future__ import annotations

import builtins
import keyword
import re
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from nbparallel_magics import flags
from nbparallel_magics.arguments import MagicParser
from nbparallel_magics.background import BackgroundCell
from nbparallel_magics.error_display import ErrorRendering
from nbparallel_magics.magics import ParallelMagics
from nbparallel_magics.post_mortem import debug_rank
from nbparallel_magics.state import ExtensionState
from nbparallel_magics.views.introspection import RankIntrospection

if TYPE_CHECKING:
    from nbparallel_magics.state import ExtensionState

# Tab completion: flags and their values on a magic's line, the ranks' own names in a cell for ranks.

PATIENCE_SECONDS = 0.1
"""How long a key press waits for rank 0."""
_MAGIC = re.compile(r"\s*(%%?[A-Za-z_]+)(?:\s|$)")
_TAKES_CODE = ("%parallel", "%rank")

Found = Iterable[tuple[str, str]]
"""Pairs of text and kind."""


def parsers() -> Mapping[str, MagicParser]:
    """Return the parsers of all magics by their names."""
    found = [value for value in vars(flags).values() if isinstance(value, MagicParser)]
    return {parser.prog.split()[0]: parser for parser in found}


class RankCompleter:
    """A matcher for IPython's completer, for lines and cells of these magics only."""

    completer_id = "nbparallel"

    def __init__(self, state: ExtensionState) -> None:
        self._state = state
        self._parsers = parsers()

    def install(self) -> None:
        """Register the matcher."""
        # one bound method: IPython finds out by an attribute which kind of matcher it is
        from IPython.core.completer import context_matcher

        def match(context: Any) -> Any:
            return self.match(context)

        self._matcher = context_matcher(identifier=self.completer_id)(match)
        self._state.shell.Completer.custom_matchers.append(self._matcher)

    def remove(self) -> None:
        """Unregister the matcher."""
        matchers = self._state.shell.Completer.custom_matchers
        if self._matcher in matchers:
            matchers.remove(self._matcher)

    def match(self, context: Any) -> dict[str, Any]:
        """Return what `IPython.core.completer` calls a simple matcher's result."""
        from IPython.core.completer import SimpleCompletion

        found = list(
            self._found(context.full_text, context.cursor_line, context.cursor_position, context.token)
        )
        return {
            "completions": [SimpleCompletion(text=text, type=kind) for text, kind in found],
            "matched_fragment": context.token,
            # where a flag belongs nothing of Python's does
            "suppress": any(
                kind in ("flag", "value", "strategy", "rank", "array", "cell", "name") for _, kind in found
            ),
        }

    def _found(self, text: str, row: int, column: int, token: str) -> Found:
        lines = text.split("\n")
        line = lines[row][:column]
        first = next((number for number, content in enumerate(lines) if content.strip()), 0)
        head = _MAGIC.match(lines[first])
        cell_magic = head[1] if head and head[1] in ("%%parallel", "%%rank") else ""
        if cell_magic and row > first:
            return self._on_ranks("\n".join(lines[first + 1 : row]), line, token)
        own = _MAGIC.match(line)
        if own is None or own[1] not in self._parsers or own.end() > column:
            return ()
        words = line[own.end() :]
        parser = self._parsers[own[1]]
        offers = {"ranks": self._ranks, "cell": self._handles, "share": self._arrays, "draw": self._names}
        if offer := offers.get(_due(parser, words.split(), token)):
            return offer(token)
        offered = list(_flags(parser, words.split(), token))
        if not offered and own[1] in _TAKES_CODE:
            code = re.sub(r"^(?:\s*-{1,2}[a-z]\S*\s+\S+)*\s*", "", words) if "-" in words else words
            return self._on_ranks("", code, token)
        return offered

    def _ranks(self, token: str) -> Found:
        session = self._state.running_session()
        for rank in range(0 if session is None else session.world_size):
            if str(rank).startswith(token):
                yield str(rank), "rank"

    def _handles(self, token: str) -> Found:
        for name, value in list(self._state.shell.user_ns.items()):
            if isinstance(value, BackgroundCell) and name.startswith(token) and name[0] != "_":
                yield name, "cell"

    def _arrays(self, token: str) -> Found:
        numpy = sys.modules.get("numpy")  # without it there is no array
        tensors: tuple[type, ...] = ()
        if numpy:
            from nbparallel.sharing.tensors import tensor_types

            tensors = tensor_types()
        for name, value in list(self._state.shell.user_ns.items()):
            if not name.startswith(token) or name[0] == "_":
                continue
            if numpy and type(value) is numpy.ndarray:
                yield name, "array"
            elif issubclass(type(value), tensors):
                yield name, "tensor"

    def _names(self, token: str) -> Found:
        """Yield the ranks' variables, and the notebook's."""
        own = (name for name in list(self._state.shell.user_ns) if name.startswith(token) and name[0] != "_")
        hidden = self._state.shell.user_ns_hidden
        found = {name for name in own if name not in hidden}
        if token:
            found |= {text for text, _ in self._on_ranks("", token, token) if text.isidentifier()}
        for name in sorted(found):
            if not keyword.iskeyword(name) and not hasattr(builtins, name):
                yield name, "name"

    def _on_ranks(self, above: str, line: str, token: str) -> Found:
        """Ask rank 0; its completions may begin before or behind the token that IPython replaces."""
        session = self._state.running_session()
        if session is None or session.place.parts:
            return
        text = f"{above}\n{line}" if above else line
        begin = len(text) - len(token)
        for found in session.complete(text, len(text), PATIENCE_SECONDS):
            if found.start >= begin:
                yield text[begin : found.start] + found.text, found.kind
            elif found.text.startswith(text[found.start : begin]):
                yield found.text[begin - found.start :], found.kind


def _due(parser: MagicParser, words: list[str], token: str) -> str:
    """Return what comes next: ``ranks``, ``cell``, the name of the flag whose value it is, or nothing."""
    before = _complete_words(words, token)
    flag, equals, _ = before[-1].partition("=") if before else ("", "", "")
    action = parser._option_string_actions.get(flag)
    if action is not None and (not equals or action.dest in ("share", "draw")):
        return action.dest
    if token.startswith("-"):
        return ""
    if parser in (flags.RANK_CELL, flags.RANK_LINE) and not before:
        return "ranks"
    return {flags.SHARE: "share", flags.DRAW: "draw", flags.RESULT: "cell"}.get(parser, "")


def _complete_words(words: list[str], token: str) -> list[str]:
    return words[:-1] if token and words and words[-1].endswith(token) else words


def _flags(parser: MagicParser, words: list[str], token: str) -> Found:
    before = _complete_words(words, token)
    last = parser._option_string_actions.get(before[-1]) if before else None
    if last is not None and last.nargs != 0:
        for choice in last.choices or ():
            if str(choice).startswith(token):
                yield str(choice), "value"
        return
    if parser is flags.STRATEGY:
        from nbparallel.sharing import get_all_sharing_strategies

        for name in get_all_sharing_strategies():
            if name.startswith(token):
                yield name, "strategy"
    only_flags = parser.usage is None  # else words come too, or code
    for flag in parser._option_string_actions:
        if flag.startswith(token) and (token or only_flags):
            yield flag, "flag"


_ATTRIBUTE = "_nbparallel_magics"
"""Attribute of the shell with state, magics and all parts: a process may have several shells."""


def load(shell: Any) -> None:
    """Register the magics in an IPython shell (idempotent; does nothing on a rank)."""
    if _on_a_rank():
        print("nbparallel is loaded in the notebook; on a rank there is nothing to load")  # noqa: T201
    elif getattr(shell, _ATTRIBUTE, None) is None:
        state = ExtensionState(shell)
        magics = ParallelMagics(state)
        introspection = RankIntrospection(shell, state.running_session)
        parts = RankCompleter(state), introspection, ErrorRendering(shell, partial(debug_rank, state)), state
        shell.register_magics(magics)
        for part in parts:
            part.install()
        setattr(shell, _ATTRIBUTE, (state, magics, parts))
        if type(shell).__module__.startswith("xeus_python"):
            print(_IN_XEUS)  # noqa: T201
        state.prestarted.start()


_IN_XEUS = (
    "nbparallel: in the xeus-python kernel the output of ranks is incomplete: it shows none that comes from "
    "other threads; use the kernel of ipykernel"
)
"""xeus-python sends what the cell's own thread prints, and ours are others."""


def _on_a_rank() -> bool:
    sharing = sys.modules.get("nbparallel.sharing")  # a rank has it; here it would bring numpy
    return sharing is not None and sharing.current_store().client != 0


def unload(shell: Any) -> None:
    """End the ranks and remove the magics (idempotent)."""
    loaded = getattr(shell, _ATTRIBUTE, None)
    if loaded is None:
        return
    setattr(shell, _ATTRIBUTE, None)
    _, magics, parts = loaded
    manager = shell.magics_manager
    for kind in ("line", "cell"):
        for name in magics.magics[kind]:
            if getattr(manager.magics[kind].get(name), "__self__", None) is magics:
                del manager.magics[kind][name]
    manager.magics["line"].setdefault("debug", manager.registry["ExecutionMagics"].debug)
    shell.configurables.remove(magics)  # IPython's Magics puts itself there
    manager.registry.pop(type(magics).__name__, None)
    for part in parts:
        part.remove()


def state_of(shell: Any) -> ExtensionState | None:
    """Return the state of the extension in a shell, or None if it is not loaded there."""
    loaded = getattr(shell, _ATTRIBUTE, None)
    return None if loaded is None else loaded[0]
