"""Colours of pictures: hues of Okabe and Ito's, which are distinct in any kind of colour blindness.

https://jfly.uni-koeln.de/color/ has them.  What stands side by side differs in `lightness`, too: computing,
waiting and moving, and the first ranks, are distinct in grey.  Text on each, black or white, has a contrast
of at least 4.5:1 (`contrast`, as WCAG 2 defines it).
"""

from __future__ import annotations

from nbparallel.errors.text import table

BLUE, VERMILLION, MINT, GREY = table.BLUE, "#E36C12", "#56CDA5", "#808080"
RANKS = (BLUE, "#E69F00", "#009E73", "#F0E442", VERMILLION, "#56B4E9", "#CC79A7")
"""Colours of ranks; with more ranks they begin again (`dashes`)."""
_DASHES = ("", "3 2", "1 2")


def colour_of(rank: int) -> str:
    """Return the colour of a rank."""
    return RANKS[rank % len(RANKS)]


def dashes(rank: int) -> str:
    """Return the dashes of a rank's outlines, which distinguish ranks of one colour; empty: none."""
    return _DASHES[min(rank // len(RANKS), len(_DASHES) - 1)]


def text_on(colour: str) -> str:
    """Return the colour in which text on `colour` is read best.

    >>> text_on("#0068A8"), text_on("#E69F00")
    ('#fff', '#000')
    """
    return max("#000", "#fff", key=lambda text: contrast(colour, text))


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, from 1 to 21.

    >>> round(contrast("#fff", "#000000"))
    21
    """
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def lightness(colour: str) -> float:
    """Return L* of CIELAB, from 0 (black) to 100: how light a colour looks in grey.

    >>> round(lightness("#fff")), round(lightness("#777777"))
    (100, 50)
    """
    return float(116 * _luminance(colour) ** (1 / 3) - 16)  # of colours that are not nearly black


def _luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
