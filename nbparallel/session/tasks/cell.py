"""A cell before it runs: its source, its options, its ranks, and the checks of all three."""

from __future__ import annotations

import ast
import keyword
import numbers
import warnings
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from nbparallel.errors import UnknownNameError, rank_list
from nbparallel.session.output import OutputSink, TaskOutput
from nbparallel.session.results import PROFILE, RACES

MOST_COMPILED = 64
"""Cells that are remembered to compile: the loop of a script runs the same one again and again."""
ON_ERROR = ("stop", "continue")


@lru_cache(maxsize=MOST_COMPILED)
def compile_cell(text: str) -> None:
    """Compile a cell once: a magic checks it before it starts ranks, and the session checks it again."""
    from IPython.core.inputtransformer2 import TransformerManager

    manager: Any = TransformerManager  # IPython's class has no annotations
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the ranks warn
        # as a whole: `return` outside of a function is no mistake of the grammar
        code = manager().transform_cell(text)
        compile(code, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def check_source(source: str, *, line_offset: int = 0, execution_count: int | None = None) -> None:
    """Raise `SyntaxError` if IPython could not run `source` as a cell.

    Parameters
    ----------
    line_offset : int
        Lines of the cell above `source`: the error counts lines as the notebook's gutter does.
    execution_count : int, optional
        The notebook's ``In[n]``, for the error's file name.
    """
    if source.lstrip().startswith("%%"):
        return  # the cell magic decides what its body means
    filename = "<cell>" if execution_count is None else f"In[{execution_count}]"
    text = "# %%parallel\n" * line_offset + source
    try:
        compile_cell(text if text.endswith("\n") else text + "\n")
    except (ValueError, OverflowError, RecursionError, MemoryError) as error:  # a null byte, too deep …
        raise SyntaxError(f"the cell cannot be compiled: {error}", (filename, None, None, None)) from None
    except SyntaxError as error:
        if error.filename in (None, "<string>", "<cell>"):
            error.filename = filename
        raise error.with_traceback(None) from None


def split_names(names: str | Iterable[str]) -> tuple[str, ...]:
    """Return names as a tuple: they can be one string, as in ``"a,b"``."""
    return tuple(names.replace(",", " ").split() if isinstance(names, str) else names)


def check_drawn(names: tuple[str, ...]) -> None:
    """Check names whose values are to be drawn; raises TypeError or ValueError."""
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"draw holds the names of variables, as in ['a', 'b'], not {names!r}")
        if not name.isidentifier() or keyword.iskeyword(name):
            raise ValueError(f"draw={name!r} is no variable's name: assign what is to be drawn to one")


@dataclass(frozen=True, slots=True)
class CellOptions:
    """The keyword arguments of `Session.run`, which describes them; `ranks` excepted."""

    namespace: MutableMapping[str, Any] | None = None
    share: str | Iterable[str] = ()
    timeout: float | None = None
    sink: OutputSink | TaskOutput | None = None
    execution_count: int | None = None
    line_offset: int = 0
    want_values: bool = True
    show_values: bool = True
    seed: int | None = None
    on_error: str = "stop"
    draw: str | Iterable[str] = ()
    check_races: bool = False
    profile: bool = False
    observers: Iterable[str] = ()

    def __post_init__(self) -> None:
        """Split the names of `share` and `draw`, which can be one string, as after the magic's flag."""
        asked = [name for name, on in ((RACES, self.check_races), (PROFILE, self.profile)) if on]
        object.__setattr__(self, "observers", (*split_names(self.observers), *asked))
        object.__setattr__(self, "share", split_names(self.share))
        object.__setattr__(self, "draw", split_names(self.draw))

    @property
    def go_on(self) -> bool:
        """Whether the other ranks run to their end when one fails."""
        return self.on_error == "continue"


def check_cell(cell: str, options: CellOptions) -> None:
    """Check a cell and its options before anything is started; raises as `Session.run`."""
    if not isinstance(cell, str):
        raise TypeError(f"a cell is its source, a string, not {type(cell).__name__}; `call` takes functions")
    if options.on_error not in ON_ERROR:
        raise ValueError(f"on_error must be one of {', '.join(ON_ERROR)}, not {options.on_error!r}")
    _check_numbers(options.timeout, options.seed)
    if not all(isinstance(name, str) for name in options.share):
        raise TypeError(f"share holds the names of arrays, as in ['a', 'b'], not {options.share!r}")
    check_drawn(tuple(options.draw))
    if options.namespace is None and options.share:
        raise UnknownNameError(
            f"share={options.share!r} names arrays of namespace, and none was passed: add "
            "namespace=globals(), or a dict of those names"
        )
    check_source(cell, line_offset=options.line_offset, execution_count=options.execution_count)


def _check_numbers(timeout: Any, seed: Any) -> None:
    if timeout is not None:
        if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
            raise TypeError(f"timeout is a number of seconds, not {timeout!r}")
        if not float(timeout) >= 0:  # NaN is not either
            raise ValueError(f"timeout is in seconds and must not be negative, not {timeout!r}")
    if seed is not None:
        if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
            raise TypeError(f"seed is a whole number, not {seed!r}")
        if seed < 0:
            raise ValueError(f"seed must not be negative, not {seed!r}")


def select_ranks(ranks: Iterable[int] | None, world_size: int) -> tuple[int, ...]:
    """Return the ranks that take part, ascending; None selects all.

    Raises
    ------
    TypeError, ValueError
        `ranks` holds something else than integers, or ranks that do not exist.
    """
    if ranks is None:
        return tuple(range(world_size))
    passed: Any = ranks
    given = list(passed) if isinstance(passed, Iterable) else [passed, None]
    if not all(isinstance(rank, numbers.Integral) and not isinstance(rank, bool) for rank in given):
        raise TypeError(f"ranks must be a sequence of integers, as [0, 2], not {passed!r}")
    selected = sorted({int(rank) for rank in given})
    if not selected or selected[0] < 0 or selected[-1] >= world_size:
        raise ValueError(f"there are {rank_list(range(world_size))}, not {selected}")
    return tuple(selected)
