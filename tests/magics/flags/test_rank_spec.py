"""Rank specifications."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest
from hypothesis import given, strategies as st
from IPython.core.error import UsageError

from nbparallel_magics.arguments import RankSpec


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("0", (0,)),
        ("-1", (3,)),
        ("0,2-3", (0, 2, 3)),
        ("3,0,0", (0, 3)),
        ("::2", (0, 2)),
        (":", (0, 1, 2, 3)),
        ("1:", (1, 2, 3)),
        ("-2:", (2, 3)),
        ("::-1", (0, 1, 2, 3)),
        ("-3--1", (1, 2, 3)),
        (" 0 , 1 ", (0, 1)),
        ("0:99", (0, 1, 2, 3)),
    ],
)
def test_forms(text: str, ranks: tuple[int, ...]) -> None:
    """Numbers, ranges, slices and negative ranks mean what Python's mean; each rank comes once, in order."""
    assert RankSpec.parse(text).resolve(4) == ranks


@pytest.mark.parametrize(
    "text", ["", ",", "0,", "a", "1.5", "0 1", "0-", "1:2:3:4", "::0", "٣", "9" * 5000, "[0]", "x()"]
)
def test_what_is_no_rank_is_refused(text: str) -> None:
    """What names no rank is refused before anything else happens, and the message says what to write."""
    with pytest.raises(ArgumentTypeError, match="rank"):
        RankSpec.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4", "no rank 4: ranks are 0-3"),
        ("-5", "no rank -5"),
        ("0-7", "no rank 7"),
        ("3-1", "write 1-3"),
        ("9:", "none of ranks are 0-3"),
    ],
)
def test_ranks_that_do_not_exist_are_refused(text: str, message: str) -> None:
    """A rank outside the world is refused with the valid range."""
    with pytest.raises(UsageError, match=message):
        RankSpec.parse(text).resolve(4)


@given(st.text(alphabet="0123456789,:- ax", max_size=12), st.integers(1, 20))
def test_any_text_is_ranks_or_an_error(text: str, world_size: int) -> None:
    """No text does anything but name existing ranks or raise an error of one line."""
    try:
        ranks = RankSpec.parse(text).resolve(world_size)
    except (ArgumentTypeError, UsageError):
        return
    assert ranks
    assert set(ranks) <= set(range(world_size))
    assert list(ranks) == sorted(set(ranks))
