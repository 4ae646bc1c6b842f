"""The registry of sharing strategies: by name, and which one new arrays use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from nbparallel.errors import StrategyUnavailableError
from nbparallel.sharing.file_descriptor import FileDescriptorStrategy
from nbparallel.sharing.strategy import Strategy

_NOT_YET = "not part of this version"
_PLANNED = ("file_system", "file_region", "mmap", "copy")

_strategies: dict[str, Strategy] = {}
_current = "file_descriptor"


@dataclass(frozen=True, slots=True)
class SharingStrategies:
    """The names of the strategies that work here; `missing` says why the others do not."""

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

    def __str__(self) -> str:
        others = "".join(f"\n  {name}: {reason}" for name, reason in self.missing.items())
        return ", ".join(self.names) + (f"\nnot here:{others}" if others else "")


def register_sharing_strategy(name: str, strategy: Strategy) -> None:
    """Make a strategy available under a name, in this process.

    Parameters
    ----------
    name : str
        An identifier that is not taken; equal to ``strategy.name``.
    strategy : Strategy
        See `nbparallel.sharing.Strategy` for what it has to promise.

    Raises
    ------
    ValueError
        The name is taken, or not the strategy's own.
    """
    if not isinstance(strategy, Strategy):
        raise TypeError(f"a sharing strategy derives from nbparallel.sharing.Strategy, not {strategy!r}")
    if not name.isidentifier() or name != strategy.name:
        raise ValueError(f"the strategy calls itself {strategy.name!r}, an identifier is needed: {name!r}")
    if name in _strategies and _strategies[name] is not strategy:
        raise ValueError(f"there is already a sharing strategy {name!r}")
    _strategies[name] = strategy


def get_sharing_strategy() -> str:
    """Return the name of the strategy that new shared arrays use."""
    return _current


def set_sharing_strategy(name: str) -> None:
    """Choose the strategy of new shared arrays; existing ones keep their memory and stay valid.

    Raises
    ------
    ValueError
        There is no such strategy; the message lists the names.
    StrategyUnavailableError
        It does not work here; the message says why, and what does.
    """
    global _current
    find_strategy(name)
    _current = name


def get_all_sharing_strategies() -> SharingStrategies:
    """Return the names of all strategies that work here.

    Iterating over the result gives the names; printing it also says why others are missing.
    """
    usable = tuple(name for name, strategy in _strategies.items() if strategy.unavailable_reason is None)
    missing = {
        name: strategy.unavailable_reason
        for name, strategy in _strategies.items()
        if strategy.unavailable_reason is not None
    }
    missing |= {name: _NOT_YET for name in _PLANNED if name not in _strategies}
    return SharingStrategies(usable, MappingProxyType(missing))


def find_strategy(name: str | None = None) -> Strategy:
    """Return a strategy that works here, by default the current one; errors as `set_sharing_strategy`."""
    name = _current if name is None else name
    strategy = _strategies.get(name)
    if strategy is not None and strategy.unavailable_reason is None:
        return strategy
    known = get_all_sharing_strategies()
    listed = ", ".join(known) or "none"
    if strategy is not None or name in known.missing:
        raise StrategyUnavailableError(
            f"sharing strategy {name!r} is not available: {known.missing[name]}; available: {listed}"
        )
    raise ValueError(f"unknown sharing strategy {name!r}; available: {listed}")


register_sharing_strategy("file_descriptor", FileDescriptorStrategy())
