"""Strips: what one rank did from a cell's beginning to its end, in true order, as wide as the page.

The height of a strip is what the rank does: computing is high, moving data lower, waiting a line at the
bottom.  Where several follow each other within a few pixels, heights are in proportion: so a strip is true
at every resolution, and distinguishes kinds without colours.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from nbparallel.session.monitoring.timeline import COMPUTING, MOVING, UNKNOWN, WAITING
from nbparallel_widgets.palette import BLUE, GREY, MINT, VERMILLION

COLOURS = {COMPUTING: BLUE, WAITING: VERMILLION, MOVING: MINT, UNKNOWN: GREY}
HEIGHTS = {COMPUTING: 14, WAITING: 4, MOVING: 9, UNKNOWN: 2}
KINDS = (COMPUTING, WAITING, MOVING)
HEIGHT, WIDTH = 14, 1000
"""Of the picture, which is stretched to the page."""
_TOGETHER = 15
"""Stretches whose pieces are worked out together."""
_FROM_BELOW = (WAITING, MOVING, COMPUTING)


def strip(about: str, pieces: str) -> str:
    """Return a picture with what is said of it."""
    return (
        f'<svg role="img" aria-label="{about}" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" '
        f'width="100%" height="{HEIGHT}">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="currentColor" fill-opacity="0.08"/>{pieces}</svg>'
    )


def areas(stretches: Sequence[tuple[float, ...]], end: float) -> Iterator[str]:
    """Yield an area for each kind, one above the other; equal neighbours are one piece of the path.

    Parameters
    ----------
    stretches : sequence
        Of each begin and end, and the seconds computing, waiting and moving in between.
    end : float
        Seconds at which the strip ends.
    """
    scale = WIDTH / end if end else 0.0
    parts = [_paths(tuple(stretches[i : i + _TOGETHER]), scale) for i in range(0, len(stretches), _TOGETHER)]
    for kind, paths in zip(_FROM_BELOW, zip(*parts, strict=True), strict=False):
        if path := "".join(paths):
            yield f'<path d="{path}" fill="{COLOURS[kind]}"/>'


@functools.lru_cache(1024)
def _paths(stretches: tuple[tuple[float, ...], ...], scale: float) -> list[str]:
    """Return the pieces of each kind: those of a strip that grows are worked out once."""
    floors = [float(HEIGHT)] * len(stretches)
    paths = []
    for kind in _FROM_BELOW:
        column, tallest = 2 + KINDS.index(kind), HEIGHTS[kind]
        pieces: list[list[float]] = []  # where each begins and ends, its floor and its height
        for i, stretch in enumerate(stretches):
            begin, until = stretch[0], stretch[1]
            if until <= begin:
                continue
            top = floors[i] - min(stretch[column] / (until - begin), 1.0) * tallest
            floor, floors[i] = round(floors[i]), top
            if (tall := floor - round(top)) > 0:
                if pieces and pieces[-1][1:] == [begin, floor, tall]:
                    pieces[-1][1] = until
                else:
                    pieces.append([begin, until, floor, tall])
        paths.append(
            "".join(
                f"M{begin * scale:.1f} {floor}v-{tall}h{(until - begin) * scale:.1f}V{floor}z"
                for begin, until, floor, tall in pieces
            )
        )
    return paths


def swatch(kind: str) -> str:
    """Return a small piece of a strip, to stand before its name."""
    h = HEIGHTS[kind]
    return (
        f'<svg aria-hidden="true" width="10" height="{HEIGHT}" class="nbp-swatch">'
        f'<rect y="{HEIGHT - h}" width="10" height="{h}" fill="{COLOURS[kind]}"/></svg>'
    )


def share_bar(shares: dict[str, float]) -> str:
    """Return a bar of what share of a whole each kind has."""
    x, pieces = 0.0, ""
    for kind, share in shares.items():
        pieces += f'<rect x="{x:.1f}" width="{100 * share:.1f}" height="8" fill="{COLOURS[kind]}"/>'
        x += 100 * share
    return (
        '<svg aria-hidden="true" viewBox="0 0 100 8" preserveAspectRatio="none" width="100%" height="8">'
        f"{pieces}</svg>"
    )
