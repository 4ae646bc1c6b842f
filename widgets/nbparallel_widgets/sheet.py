"""What pictures of ranks have in common: colours, the style sheet, strips, tables and folds.

A front end that shows a new figure replaces the whole output that it stands in, and with it whatever was
opened or had the keyboard's focus.  So what a user touches is an output of its own, which is never replaced:
two ``<details>``, empty but for their names.  What they open is in another output; it is shown as long as
they are open by a rule of the style sheet (``:has``).  Where style sheets are removed (GitHub), it is shown.

The columns depend on the width of the panel, not of the window: three layouts, none of which clips anything.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nbparallel.errors.text import table
from nbparallel.errors.text.escaping import escape_html
from nbparallel.session.monitoring.timeline import COMPUTING, MOVING, UNKNOWN, WAITING

# Colours: hues of Okabe and Ito's, which are distinct in any kind of colour blindness.
#
# https://jfly.uni-koeln.de/color/ has them.  What stands side by side differs in lightness, too: computing,
# waiting and moving, and the first ranks, are distinct in grey.  Text on each, black or white, has a contrast
# of at least 4.5:1 (`contrast`, as WCAG 2 defines it).

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
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    """Return how much light a colour has, from 0 (black) to 1."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


# Strips: what one rank did from a cell's beginning to its end, in true order, as wide as the page.
#
# The height of a strip is what the rank does: computing is high, moving data lower, waiting a line at the
# bottom.  Where several follow each other within a few pixels, heights are in proportion: so a strip is true
# at every resolution, and distinguishes kinds without colours.

COLOURS = {COMPUTING: BLUE, WAITING: VERMILLION, MOVING: MINT, UNKNOWN: GREY}
LETTERS = {COMPUTING: "█", WAITING: "·", MOVING: "▒", UNKNOWN: "?"}
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


def letters(pieces: Iterable[tuple[float, float, Mapping[str, float]]], whole: float, width: int) -> str:
    """Return a strip as so many letters: what took most of each part; blank where there was nothing.

    Parameters
    ----------
    pieces : iterable
        Of each begin and end, and the share of each kind in between.
    whole : float
        Seconds at which the strip ends.
    """
    shares: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(width)]
    part = whole / width or 1.0
    for begin, end, kinds in pieces:
        for i in range(int(begin / part), min(int(end / part), width - 1) + 1):
            length = max(0.0, min(end, (i + 1) * part) - max(begin, i * part))
            for kind, share in kinds.items():
                shares[i][kind] += length * share
    return "".join(
        LETTERS[max(share, key=share.__getitem__)] if any(share.values()) else " " for share in shares
    )


def swatch(kind: str) -> str:
    """Return a small piece of a strip, to stand before its name."""
    h = HEIGHTS[kind]
    return (
        f'<svg aria-hidden="true" width="10" height="{HEIGHT}" class="nbp-swatch">'
        f'<rect y="{HEIGHT - h}" width="10" height="{h}" fill="{COLOURS[kind]}"/></svg>'
    )


def share_bar(shares: Mapping[str, float]) -> str:
    """Return a bar of what share of a whole each kind has."""
    return stacked_bar(((share, f'fill="{COLOURS[kind]}"') for kind, share in shares.items()), 8)


def stacked_bar(parts: Iterable[tuple[float, str]], height: int, about: str = "") -> str:
    """Return a bar of parts of a whole: the share and the look of each; `about`: what is said of it."""
    x, pieces = 0.0, ""
    for share, look in parts:
        pieces += f'<rect x="{1000 * x:.1f}" width="{1000 * share:.1f}" height="{height}" {look}/>'
        x += share
    role = f'role="img" aria-label="{about}"' if about else 'aria-hidden="true"'
    return (
        f'<svg {role} viewBox="0 0 1000 {height}" preserveAspectRatio="none" width="100%" height="{height}">'
        f"{pieces}</svg>"
    )


@dataclass(frozen=True, slots=True, repr=False)
class Grid(table.Table):
    """A table without a card around it, whose title is its caption; its cells may be shaded."""

    shades: Sequence[Sequence[float]] = ()
    """How dark each cell is, 0 to 1, without the first of each row; empty: none is."""

    def html(self) -> str:
        """Return the table; a wide one scrolls inside its place.  Without rows: the caption."""
        caption = escape_html(self.title)
        if not self.rows:
            return f"<p>{caption}</p>"
        numbers = self.numbers()
        side = [' class="nbp-n"' * (i in numbers) for i in range(len(self.head))]
        head = "".join(
            f'<th scope="col"{where}>{escape_html(name)}</th>'
            for where, name in zip(side, self.head, strict=True)
        )
        rows = "".join(
            f'<tr><th scope="row"{side[0]}>{escape_html(row[0])}</th>'
            + "".join(
                f"<td{side[x]}{self._shade(y, x)}>{escape_html(row[x])}</td>" for x in range(1, len(row))
            )
            + "</tr>"
            for y, row in enumerate(self.rows)
        )
        return (
            f'<div class="nbp-scroll" role="group" aria-label="{caption}" tabindex="0">'
            f'<table class="nbp-grid"><caption>{caption}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        )

    def _shade(self, y: int, x: int) -> str:
        dark = self.shades[y][x - 1] if self.shades else 0.0
        # on light and on dark: text keeps its contrast up to a third of the colour
        return f' style="background:{VERMILLION}{round(84 * dark):02x}"' if dark > 0.02 else ""


FOLDS = {
    "segments": "segments and memory of each rank",
    "matrices": "which rank waited for which, and sent to which",
}
"""What can be opened, with what it is called."""

STYLE = """<style>
.nbp{--nbp-mute:#5f6368;--nbp-bad:#b3261e;--nbp-line:#8885;color:inherit;container-type:inline-size;
font-size:13px;line-height:1.45;font-variant-numeric:tabular-nums}
[data-jp-theme-light=false] .nbp,.vscode-dark .nbp,[data-theme=dark] .nbp{--nbp-mute:#b0b0b0;
--nbp-bad:#ff8a80}
.nbp-card{border:1px solid var(--nbp-line);border-radius:6px;padding:8px 12px;margin:2px 0}
.nbp.nbp table{display:block;color:inherit;width:100%;margin:0;border:0;table-layout:auto;font-size:inherit}
.nbp.nbp caption{display:block;text-align:left;padding:0;color:inherit;white-space:normal;font-size:inherit}
.nbp.nbp thead,.nbp.nbp tbody{display:block;border:0}
.nbp-head{display:flex;flex-wrap:wrap;gap:0 12px;align-items:baseline}
.nbp-head b{font-size:15px;font-weight:600}
.nbp-head small{margin-left:auto;font-size:12px;color:var(--nbp-mute)}
.nbp.nbp .nbp-bad{color:var(--nbp-bad)}
.nbp-done{height:4px;border-radius:2px;background:#8883;margin:5px 0 1px;overflow:hidden}
.nbp-done div{height:4px;background:BLUE}
.nbp-more{display:flex;flex-wrap:wrap;gap:0 12px;font-size:12px;color:var(--nbp-mute);min-height:1.45em}
.nbp-more>span:first-child{margin-right:auto}
.nbp.nbp .nbp-swatch{display:inline-block;width:10px;vertical-align:-2px;margin-right:4px}
.nbp.nbp svg{display:block;max-width:none;height:14px}
.nbp.nbp .nbp-share svg{height:8px}
.nbp.nbp .nbp-memory svg{height:12px}
.nbp.nbp .nbp-grid,.nbp.nbp .nbp-grid thead,.nbp.nbp .nbp-grid tbody{display:revert;width:auto}
.nbp.nbp .nbp-grid caption{display:table-caption;white-space:nowrap;font-weight:bold}
.nbp.nbp tr,.nbp.nbp thead tr{background:none;border:0}
.nbp.nbp .nbp-ranks tbody tr{background:none}
.nbp.nbp .nbp-ranks tr{display:grid;align-items:center;padding:2px 6px;margin:0 -6px;border-radius:4px;
column-gap:10px;grid-template-columns:64px minmax(120px,1fr) 104px 58px 78px minmax(190px,260px)}
.nbp.nbp .nbp-ranks tbody .nbp-hot{background:VERMILLION22}
.nbp.nbp .nbp-ranks tbody .nbp-wrong{background:rgba(200,40,30,.13)}
.nbp-chip{background:VERMILLION;color:#000;border-radius:9px;padding:0 7px;font-size:11px;white-space:nowrap;
display:inline-block}
.nbp-wrong .nbp-chip{background:#b3261e;color:#fff}
.nbp.nbp th,.nbp.nbp td{border:0;padding:0;text-align:left;vertical-align:middle;max-width:none;
white-space:nowrap;line-height:1.45;min-width:0}
.nbp.nbp .nbp-grid th,.nbp.nbp .nbp-grid td{padding:1px 5px}
.nbp.nbp thead th{font-weight:normal;font-size:11px;color:var(--nbp-mute)}
.nbp.nbp .nbp-grid thead th{font-size:inherit}
.nbp.nbp .nbp-ranks th,.nbp.nbp .nbp-ranks td{display:block}
.nbp.nbp .nbp-ranks thead .nbp-bar{display:flex;justify-content:space-between}
.nbp.nbp .nbp-n{text-align:right}
.nbp.nbp .nbp-ranks .nbp-host{grid-column:1/-1;color:var(--nbp-mute);font-size:12px;padding-top:4px}
.nbp.nbp .nbp-own{color:var(--nbp-mute)}
.nbp.nbp .nbp-ranks .nbp-state{white-space:normal}
.nbp.nbp .nbp-timeline .nbp-ranks tr,.nbp.nbp-timeline .nbp-ranks tr{
grid-template-columns:64px minmax(120px,1fr) 64px minmax(0,150px)}
.nbp-axis{position:relative;width:100%;height:1.45em}
.nbp-axis span{position:absolute;transform:translateX(-50%)}
.nbp-axis span:first-child{transform:none}
.nbp-axis span:last-child[style*="left:9"],.nbp-axis span:last-child[style*="left:100"]{
transform:translateX(-100%)}
.nbp-timeline .nbp-now{min-height:0}
.nbp-hidden{position:absolute;clip-path:inset(50%)}
.nbp-cut{stroke:#fff;stroke-width:1.5;vector-effect:non-scaling-stroke;stroke-opacity:.8}
.nbp-x{fill:var(--nbp-bad)}
.nbp.nbp p{margin:2px 0}
.nbp-now{font-size:12px;color:var(--nbp-mute);min-height:3.2em}
.nbp-memory{display:grid;grid-template-columns:64px 1fr;gap:2px 10px;padding-top:6px;align-items:center}
.nbp-memory,.nbp-as-of{font-size:12px;color:var(--nbp-mute)}
.nbp-memory b{color:var(--jp-content-font-color1,inherit)}
.nbp-boxes{display:flex;gap:2px;overflow:hidden}
.nbp-box{min-width:2px;overflow:hidden;white-space:nowrap;text-overflow:ellipsis}
.nbp-box i{display:block;height:14px;border:1px solid BLUE;background:BLUE33}
.nbp-moves i{border-style:dashed}
.nbp.nbp .nbp-as-of{text-align:right;margin:4px 0 0}
.nbp.nbp .nbp-lines .nbp-hot{background:VERMILLION22}
.nbp.nbp .nbp-lines .nbp-line{width:140px;min-width:90px}
.nbp.nbp .nbp-lines code{white-space:pre;background:none;padding:0 0 0 8px}
.nbp-scroll{overflow-x:auto;margin-bottom:8px}
.nbp-folds{display:flex;flex-wrap:wrap;gap:2px 24px}
.nbp-folds summary{cursor:pointer}
.nbp.nbp code{white-space:nowrap}
.nbp-stale{visibility:hidden;position:absolute;max-width:0;max-height:0;overflow:hidden;
animation:nbp-stale 0s 5s forwards}
@keyframes nbp-stale{to{visibility:visible;position:static;max-width:none;max-height:none}}
.nbp-live{animation:nbp-grey 0s 5s forwards}
@keyframes nbp-grey{to{filter:grayscale(1)}}
.nbp-live .nbp-title{animation:nbp-old 0s 5s forwards}
@keyframes nbp-old{to{visibility:hidden;position:absolute}}
.nbp-press{display:none}
#main .nbp-word{display:none}
#main .nbp-press{display:inline-block!important;font:inherit;color:inherit;background:none;border:1px solid;
border-radius:3px;padding:0 8px;cursor:pointer}
@container (max-width:900px){
.nbp.nbp .nbp-ranks tr{grid-template-columns:58px 1fr 52px 72px}
.nbp.nbp .nbp-ranks .nbp-share{display:none}
.nbp.nbp .nbp-ranks .nbp-state{grid-column:2/-1}
.nbp.nbp .nbp-ranks .nbp-state:empty{display:none}
.nbp.nbp .nbp-ranks th.nbp-state{position:absolute;clip-path:inset(50%)}
.nbp.nbp .nbp-lines .nbp-fast{display:none}
.nbp.nbp .nbp-lines .nbp-line{width:90px}}
@container (max-width:420px){
.nbp.nbp .nbp-ranks tr{grid-template-columns:1fr 52px 76px}
.nbp.nbp .nbp-ranks .nbp-bar{grid-row:2;grid-column:1/-1}
.nbp.nbp .nbp-ranks .nbp-state{grid-column:1/-1}
.nbp-memory{grid-template-columns:1fr}
.nbp-memory>span:empty{display:none}}
</style>""".replace("BLUE", BLUE).replace("VERMILLION", VERMILLION)
"""Sent once with a panel, not with each of its figures."""

INTERRUPT = (
    '<button type="button" class="nbp-press" style="display:none" '
    'data-commandlinker-command="notebook:interrupt-kernel">■ interrupt</button>'
)
"""Runs JupyterLab's own command, also while a cell runs; no other front end shows it."""

HOW = (
    '<span class="nbp-word">■ in the toolbar, or I I, interrupts the ranks; </span>'
    "to keep the panel in sight: right-click, Create New View for Cell Output; "
    "<code>%parallel_panel --close</code> closes it"
)


def folds_bundle(identity: str, *, live: bool) -> dict[str, str]:
    """Return the output with what a user opens, and, of a live panel, how to interrupt and close.

    Parameters
    ----------
    identity : str
        Letters that distinguish this panel from others on the page.
    """
    rules = "".join(
        f".nbp-{name}-{identity}{{display:none}}"
        f"body:has(.nbp-open-{name}-{identity}[open]) .nbp-{name}-{identity}{{display:block}}"
        for name in FOLDS
    )
    folds = "".join(
        f'<details class="nbp-open-{name}-{identity}"><summary>{title}</summary></details>'
        for name, title in FOLDS.items()
    )
    how = f"<div>{INTERRUPT} {HOW}</div>" if live else ""
    text = "" if not live else re.sub("<[^>]+>", "", HOW)
    return {
        "text/plain": text,
        "text/html": f"{STYLE}<style>@supports selector(body:has(a)){{{rules}}}</style>"
        f'<div class="nbp"><div class="nbp-folds">{folds}</div>{how}</div>',
    }


def folded_html(identity: str, contents: dict[str, str]) -> str:
    """Return what the folds of `identity` open."""
    parts = "".join(
        f'<div class="nbp-{name}-{identity}">{content}</div>' for name, content in contents.items()
    )
    return f'<div class="nbp">{parts}</div>'


def host_bodies(hosts: Mapping[str, Sequence[str]]) -> str:
    """Return rows of the table of ranks, by the name of their host, which stands above them if it has one."""
    return "".join(
        "<tbody>"
        + f'<tr><th scope="rowgroup" class="nbp-host">{escape_html(f"host {host}")}</th></tr>' * bool(host)
        + f"{''.join(rows)}</tbody>"
        for host, rows in hosts.items()
    )


def details_html(contents: dict[str, str]) -> str:
    """Return folds with what they open, for what is shown once."""
    return "".join(
        f"<details><summary>{FOLDS[name]}</summary>{content}</details>" for name, content in contents.items()
    )
