"""Names that the notebook does not have but ranks do: ``all_reduce?``, and where a NameError finds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nbparallel_magics.output.publisher import publisher_for

if TYPE_CHECKING:
    from nbparallel import Session

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
    """Has IPython's ``?``, tooltips and errors about missing names find what is defined on ranks.

    Parameters
    ----------
    shell : InteractiveShell
        The notebook's.
    session : callable
        Returns the session that runs, or None.
    """

    def __init__(self, shell: Any, session: Callable[[], Session | None]) -> None:
        self._shell, self._session = shell, session

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
