"""Rank specifications: ``0,2-3``, ``::2``, ``-1``.  They are parsed, never evaluated."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NUMBER = r"-?[0-9]{1,9}"
_ONE = re.compile(f"({_NUMBER})")
_SPAN = re.compile(f"({_NUMBER})-({_NUMBER})")
_SLICE = re.compile(f"({_NUMBER})?:({_NUMBER})?(?::({_NUMBER})?)?")
_FORMS = "write numbers and ranges as in 0,2-3, a slice as in ::2, or -1 for the last"


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Some ranks, before it is known how many there are."""

    text: str
    """As the user wrote it."""

    @classmethod
    def parse(cls, text: str) -> RankSpec:
        """Check the form of `text`; ValueError says what is wrong with it."""
        for part in _parts(text):
            match = _SLICE.fullmatch(part)
            if match and match[3] is not None and int(match[3]) == 0:
                raise ValueError(f"{part!r} in the ranks {text!r}: the step of a slice must not be 0")
            if not match and not _ONE.fullmatch(part) and not _SPAN.fullmatch(part):
                raise ValueError(f"{part!r} in the ranks {text!r} names no rank: {_FORMS}")
        return cls(text)

    def resolve(self, world_size: int) -> tuple[int, ...]:
        """Return the ranks, in ascending order, each once; ValueError if one does not exist."""
        chosen: set[int] = set()
        for part in _parts(self.text):
            if match := _SLICE.fullmatch(part):
                start, stop, step = (int(group) if group else None for group in match.groups())
                chosen.update(range(world_size)[start:stop:step])
            elif match := _ONE.fullmatch(part):
                chosen.add(self._rank(match[1], world_size))
            elif match := _SPAN.fullmatch(part):
                first, last = (self._rank(number, world_size) for number in match.groups())
                if first > last:
                    raise ValueError(
                        f"{part!r} in the ranks {self.text!r} runs backwards: write {last}-{first}"
                    )
                chosen.update(range(first, last + 1))
        if not chosen:
            raise ValueError(f"the ranks {self.text!r} are none of {_valid(world_size)}")
        return tuple(sorted(chosen))

    def _rank(self, number: str, world_size: int) -> int:
        rank = int(number)
        if not -world_size <= rank < world_size:
            raise ValueError(f"there is no rank {rank}: {_valid(world_size)}, and -1 is the last")
        return rank % world_size


def _parts(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ValueError(f"the ranks {text!r} have an empty part: {_FORMS}")
    return parts


def _valid(world_size: int) -> str:
    return "the only rank is 0" if world_size == 1 else f"ranks are 0-{world_size - 1}"
