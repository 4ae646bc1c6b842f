"""The registry of sharing strategies: by name, and which one new arrays use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from nbparallel.errors import InvalidHandleError, StrategyUnavailableError
from nbparallel.sharing.strategies.copy import CopyStrategy
from nbparallel.sharing.strategies.memfd import FileDescriptorStrategy, FileRegionStrategy
from nbparallel.sharing.strategies.named_files import FileSystemStrategy, MemoryMapStrategy
from nbparallel.sharing.strategies.strategy import Strategy

_BUILT_IN = (
    FileDescriptorStrategy(),
    FileSystemStrategy(),
    FileRegionStrategy(),
    MemoryMapStrategy(),
    CopyStrategy(),
)
"""A new one also gets its row in the table of `%sharing_strategy` (``views/sharing.py``, `_COSTS`), and its
file in ruff's list of those that inherit `Strategy`'s docstrings (``pyproject.toml``).
"""
_TRANSPORTS = ("file_descriptor", "file_system")
"""Strategies of messages and copies of objects, whatever was chosen for arrays: the first that works here."""

_strategies: dict[str, Strategy] = {strategy.name: strategy for strategy in _BUILT_IN}
_generation = 1
"""Counts the user's decisions."""


def _usual() -> str:
    """Return the first of the strategies of messages that works here; if none does, the first."""
    return next((n for n in _TRANSPORTS if _strategies[n].unavailable_reason is None), _TRANSPORTS[0])


_current = _usual()


@dataclass(frozen=True, slots=True, eq=False)
class SharingStrategies(Set[str]):
    """The set of the names of the strategies that work here; `missing` says why the others do not."""

    names: tuple[str, ...]
    """Usable with `set_sharing_strategy`."""
    missing: Mapping[str, str]
    """Name -> reason of those that are not."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    @classmethod
    def _from_iterable(cls, names: Iterable[str]) -> Set[str]:  # type: ignore[override]  # typeshed: Self
        return frozenset(names)  # of what is computed from it

    def __str__(self) -> str:
        others = "".join(f"\n  {name}: {reason}" for name, reason in self.missing.items())
        return ", ".join(self.names) + (f"\nnot here:{others}" if others else "")

    def __repr__(self) -> str:
        # What a notebook shows of a cell's last line.
        return str(self)


@dataclass(frozen=True, slots=True)
class Choice:
    """What the user decided about strategies, for the other processes of a session."""

    current: str
    """Name of the strategy of new arrays."""
    options: Mapping[str, Mapping[str, Any]]
    """Options of the strategies that have any set, by name."""
    own: tuple[Strategy, ...]
    """The user's own strategies."""


def generation() -> int:
    """Return a number that is another one after every decision."""
    return _generation


def choice() -> Choice:
    """Return what has been decided so far."""
    options = {name: strategy.options for name, strategy in _strategies.items() if strategy.options}
    own = tuple(strategy for strategy in _strategies.values() if strategy not in _BUILT_IN)
    return Choice(_current, options, own)


def follow(other: Choice) -> None:
    """Decide as another process did; errors as `set_sharing_strategy`."""
    global _current, _generation
    _strategies.update({strategy.name: strategy for strategy in other.own})
    for name, options in other.options.items():
        _strategies[name].configure(**options)
    find_strategy(other.current)
    _current = other.current
    _generation += 1


def register_sharing_strategy(name: str, strategy: Strategy) -> None:
    """Make a strategy available under a name, here and, from the next cell on, on all ranks.

    A name of your own may be registered again, as by a cell that runs again: the new object takes the place
    of the old one, and serves the arrays that exist as well.

    Parameters
    ----------
    name : str
        An identifier that is no built-in strategy's; equal to ``strategy.name``.
    strategy : Strategy
        See `nbparallel.sharing.Strategy` for what it has to promise.

    Raises
    ------
    TypeError
        It is no `Strategy` object.
    ValueError
        The name is a built-in strategy's, not the strategy's own, or no identifier.
    """
    global _generation
    if isinstance(strategy, type):
        raise TypeError(f"register an object, {strategy.__name__}(…), not the class itself")
    if not isinstance(strategy, Strategy):
        raise TypeError(f"a sharing strategy derives from nbparallel.sharing.Strategy, not {strategy!r}")
    if name != strategy.name:
        raise ValueError(f"the strategy's own `name` is {strategy.name!r}: register it as that, not {name!r}")
    if not name.isidentifier():
        raise ValueError(f"a sharing strategy's name is an identifier, as 'my_files', not {name!r}")
    if any(name == built_in.name for built_in in _BUILT_IN):
        raise ValueError(f"there is already a built-in sharing strategy {name!r}: choose another name")
    _strategies[name] = strategy
    _generation += 1


def get_sharing_strategy() -> str:
    """Return the name of the strategy that new shared arrays use."""
    return _current


def set_sharing_strategy(name: str, **options: Any) -> None:
    """Choose the strategy of new shared arrays; existing ones keep their memory and stay valid.

    In a notebook or script it holds for all ranks of all sessions as well, from their next task on; on a
    rank, for this rank, until the notebook switches again.

    Parameters
    ----------
    name : str
        One of `get_all_sharing_strategies`.
    **options
        What the strategy offers: ``mmap`` takes ``directory=``, where its temporary files go, and
        ``allow_network=True``, by which that may be on another machine.

    Raises
    ------
    ValueError
        There is no such strategy; the message lists the names.
    StrategyUnavailableError
        It does not work here; the message has the reason, and a strategy that works.
    """
    global _current, _generation
    if not isinstance(name, str):
        raise _unknown(name)  # None, too: it means the current one elsewhere
    if options and name in _strategies:
        _strategies[name].configure(**options)
    find_strategy(name)
    _current = name
    _generation += 1


def get_all_sharing_strategies() -> SharingStrategies:
    """Return the names of all strategies that work here.

    Iterating over the result gives the names; printing it also shows why others are missing.
    """
    usable = tuple(name for name, strategy in _strategies.items() if strategy.unavailable_reason is None)
    missing = {
        name: strategy.unavailable_reason
        for name, strategy in _strategies.items()
        if strategy.unavailable_reason is not None
    }
    return SharingStrategies(usable, MappingProxyType(missing))


def strategies() -> Mapping[str, Strategy]:
    """Return all strategies, also those that do not work here, by name."""
    return MappingProxyType(_strategies)


def find_strategy(name: str | None = None) -> Strategy:
    """Return a strategy that works here, by default the current one; errors as `set_sharing_strategy`."""
    name = _current if name is None else name
    if (strategy := _strategies.get(name)) is None:
        raise _unknown(name)
    if (reason := strategy.unavailable_reason) is not None:  # asked once: it may pass
        raise StrategyUnavailableError(
            f"sharing strategy {name!r} is not available: {reason}; available: {_listed()}"
        )
    return strategy


def _unknown(name: object) -> ValueError:
    return ValueError(f"unknown sharing strategy {name!r}; available: {_listed()}")


def _listed() -> str:
    return ", ".join(get_all_sharing_strategies()) or "none"


def transport() -> Strategy:
    """Return the strategy of our own messages, whatever the user chose for arrays."""
    return find_strategy(_usual())


def strategy_of(name: str) -> Strategy:
    """Return the strategy of a segment that exists, whether or not new ones can be made.

    Raises
    ------
    InvalidHandleError
        This process knows none of that name that shares memory.
    """
    strategy = _strategies.get(name)
    if strategy is None or not strategy.shares:
        raise InvalidHandleError(
            f"a handle names the sharing strategy {name!r} for its segment, and this process knows none "
            "of that name: call nbp.register_sharing_strategy in the notebook"
        )
    return strategy
