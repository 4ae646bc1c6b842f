"""Names of ranks where IPython looks for names: completion, ``all_reduce?``, and below a NameError."""

from __future__ import annotations

import builtins
import keyword
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from nbparallel_magics import flags
from nbparallel_magics.arguments import MagicParser
from nbparallel_magics.background import BackgroundCell
from nbparallel_magics.output.publisher import publisher_for
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
        # a function of its own: IPython marks by an attribute which kind of matcher it is
        from IPython.core.completer import context_matcher

        self._matcher = context_matcher(identifier=self.completer_id)(lambda context: self.match(context))
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


# Names that the notebook does not have but ranks do.

_WHERE = "predefined on the ranks"
_NUMBERS = {
    "rank": "this rank's number, from 0 on",
    "world_size": "how many ranks there are",
    "rng": "this rank's own random numbers, a numpy.random.Generator",
}


class RankVariable:
    """A variable of ranks, which the notebook does not have.

    `%%parallel` with ``name?`` below it describes the value itself, `-o name` copies it into the notebook.
    """

    def __init__(self, text: str, ranks: tuple[int, ...] = (), *, is_function: bool = False) -> None:
        self._text = text
        self.ranks = ranks
        """Those that have it; empty for what all find predefined."""
        self.is_function = is_function
        """Whether it is a function on each of them."""

    def __repr__(self) -> str:
        return self._text


class RankIntrospection:
    """Has IPython's ``?``, tooltips and errors about missing names find what is defined on ranks."""

    def __init__(self, state: ExtensionState) -> None:
        self._shell, self._session = state.shell, state.running_session

    def install(self) -> None:
        """Look on the ranks for what the notebook does not have."""
        self._find_here = self._shell._object_find
        self._installed = self.find
        self._shell._object_find = self._installed
        self._shell.events.register("post_run_cell", self.end_cell)

    def remove(self) -> None:
        """Look in the notebook only."""
        if vars(self._shell).get("_object_find") is self._installed:
            del self._shell._object_find
        self._shell.events.unregister("post_run_cell", self.end_cell)

    def end_cell(self, result: Any) -> None:
        """Say below a cell of the notebook that lacked a name where that name is (``post_run_cell``)."""
        error = getattr(result, "error_in_exec", None)
        if type(error) is not NameError or result.info.raw_cell.lstrip().startswith("%%parallel"):
            return  # with --local a cell for ranks runs here, too
        if error.name and result.info.store_history and self._raised_by_the_cell(error):
            advice = self._advice(error.name)
            if advice:
                publisher_for(self._shell, None).note(f"[nbparallel] {advice}\n")

    def _raised_by_the_cell(self, error: NameError) -> bool:
        """Whether code of the notebook missed the name, rather than a module that it called."""
        step = error.__traceback__
        while step is not None and step.tb_next is not None:
            step = step.tb_next
        return step is not None and step.tb_frame.f_globals is self._shell.user_ns

    def _advice(self, name: str) -> str:
        from nbparallel.errors import NbParallelError
        from nbparallel.session.names.delivery import PREDEFINED_NAMES

        if name == "nbp":  # in a cell for ranks `nbp.zeros` would make an array for each
            return "ranks have nbp by themselves, the notebook does not: write `import nbparallel as nbp`"
        if name in PREDEFINED_NAMES:
            return f"ranks have {name}, the notebook does not: begin this cell with `%%parallel`"
        session = self._session()
        try:
            found = None if session is None else self._on_ranks(name)
        except NbParallelError:  # ranks that end now; the cell's own error is there already
            return ""
        if session is None or found is None:
            return ""
        if found.is_function:
            return f"only ranks have {found!r}; one that a cell without `%%parallel` defines, both have"
        some = f"-r {','.join(map(str, found.ranks))} " if len(found.ranks) < session.world_size else ""
        line = f"`%parallel {some}-o {name} {name}`"
        return f"only ranks have {found!r}; {line} puts the list of their values here"

    def find(self, oname: str, namespaces: Any = None) -> Any:
        """Return IPython's ``OInfo`` about a name."""
        found = self._find_here(oname, namespaces)
        name = oname.strip()
        if found.found or namespaces is not None or not name or name[0] == "%":
            return found
        found_there = self._find_here(oname, [(_WHERE, _predefined())])
        if not found_there.found and (on_ranks := self._on_ranks(name.partition(".")[0])):
            head = {name.partition(".")[0]: on_ranks}
            found_there = self._find_here(next(iter(head)), [("the ranks", head)])
        return found_there if found_there.found else found

    def _on_ranks(self, name: str) -> RankVariable | None:
        session = self._session()
        if session is None:
            return None
        from nbparallel.errors import grouped, rank_list

        known = next((seen for seen in session.who({}, {}).names if seen.name == name), None)
        if known is None:
            return None
        kinds = grouped((seen.looks, rank) for rank, seen in known.ranks.items())
        return RankVariable(
            f"{name}: " + "; ".join(f"{looks} on {rank_list(ranks)}" for looks, ranks in kinds.items()),
            tuple(known.ranks),
            is_function=set(kinds) == {"function"},
        )


def _predefined() -> Mapping[str, Any]:
    """Return what ranks find predefined, and the other operations, by name."""
    import nbparallel
    from nbparallel import distributed

    numbers = {name: RankVariable(f"{name}: {text}") for name, text in _NUMBERS.items()}
    operations = {name: getattr(distributed, name) for name in distributed.__all__}
    return {"nbp": nbparallel, "dist": distributed, **numbers, **operations}
