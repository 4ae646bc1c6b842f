"""What a flag has measured of a cell: the time of each line, and how much faster more ranks are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from nbparallel.distributed.tracing.profiling.profile import Profile, ProfiledLine
from nbparallel.errors.text.escaping import escape_html
from nbparallel.session.diagnostics.measurement import Scaling
from nbparallel_widgets.sheet import BLUE, KINDS, STYLE, VERMILLION, share_bar, swatch


@dataclass(frozen=True, slots=True)
class ProfileView:
    """A profile as a notebook shows it: as text, or as a picture of the code."""

    profile: Profile
    """Of a cell's result."""

    def __repr__(self) -> str:
        return str(self.profile)

    def _repr_html_(self) -> str:
        profile = self.profile
        key = "".join(f"<span>{swatch(kind)}{kind}</span>" for kind in KINDS)
        tables = "".join(self._table(file, rows) for file, rows in profile.shown())
        foot = "".join(f"<p>{escape_html(line)}</p>" for line in profile.foot())
        return (
            f'{STYLE}<div class="nbp nbp-card nbp-profile"><div class="nbp-head">'
            f'<b class="nbp-title">{escape_html(profile.title)}</b>'
            f"<small>{escape_html(profile.subtitle)}</small></div>"
            f'<div class="nbp-more"><span></span>{key}</div>{tables}<div class="nbp-now">{foot}</div></div>'
        )

    def _table(self, file: str, rows: list[tuple[int, str, ProfiledLine | None]]) -> str:
        longest = self.profile.longest
        most = longest.mean.seconds if longest is not None else 0.0
        bars = {
            number: share_bar({kind: getattr(line.mean, kind) / most for kind in KINDS})
            for number, _, line in rows
            if line is not None and most
        }
        body = "".join(
            ('<tr class="nbp-hot">' if line is not None and line is longest else "<tr>")
            + f'<th scope="row" class="nbp-n">{number or "⋮"}</th>'
            f'<td class="nbp-line">{bars.get(number, "")}</td>'
            + "".join(
                f'<td class="nbp-n{kind}">{figure}</td>'
                for figure, kind in zip(self.profile.figures(line), ("", " nbp-fast", ""), strict=True)
            )
            + f"<td><code>{escape_html(code)}</code></td></tr>"
            for number, code, line in rows
        )
        head = "".join(
            f'<th scope="col"{side}>{name}</th>'
            for name, side in (
                ("line", ' class="nbp-n"'), ("time", ""), ("average", ' class="nbp-n"'),
                ("fastest rank", ' class="nbp-n nbp-fast"'), ("slowest rank", ' class="nbp-n"'),
                (escape_html(file) or "cell", ""),
            )
        )  # fmt: skip
        return (
            '<div class="nbp-scroll" role="group" aria-label="time of each line" tabindex="0">'
            f'<table class="nbp-grid nbp-lines">'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
            "</div>"
        )


# How much faster more ranks are: speed-up and efficiency beside the ideal.

_WIDE, _HIGH, _LEFT, _RIGHT, _TOP, _FLOOR = 340, 210, 40, 12, 24, 30
_STEPS = 60
"""Points of a curve."""


def scaling_html(scaling: Scaling) -> str:
    """Return two charts, what follows from them, and the figures."""
    most = scaling.counts[-1]
    curve = [1 + (most - 1) * i / _STEPS for i in range(_STEPS + 1)]
    known = scaling.serial is not None
    amdahl = [(n, scaling.predicted(n)) for n in curve] if known else []
    shares = [(n, value / n) for n, value in amdahl]
    start = min(1.0, most / 2)
    charts = (
        _chart("speed-up", scaling, scaling.speedup, [(start, start), (most, most)], amdahl, most),
        _chart("efficiency", scaling, scaling.efficiency, [(start, 1), (most, 1)], shares, 1.0),
    )
    key = (
        f'<span style="color:{BLUE}">●</span> measured  ┄ ideal'
        + f'  <span style="color:{VERMILLION}">─</span> Amdahl\'s law' * known
    )
    said = escape_html("; ".join(scaling.sentences()))
    table = scaling.table()
    figures = replace(table, foot=table.foot.splitlines()[-1])  # the rest is said above
    return (
        f'{STYLE}<div class="nbp nbp-card"><div class="nbp-head"><b>{said}</b></div>'
        f'<div class="nbp-more"><span></span><span>{key}</span></div>'
        f'<div style="display:flex;flex-wrap:wrap;gap:8px 24px">{"".join(charts)}</div></div>'
        f"{figures.html()}"
    )


def _chart(
    name: str,
    scaling: Scaling,
    values: Sequence[float],
    ideal: Sequence[tuple[float, float]],
    fitted: Iterable[tuple[float, float]],
    most: float,
) -> str:
    """Return one chart; its axes begin at 0."""
    high, wide = 1.08 * max(most, *values), scaling.counts[-1]

    def place(n: float, value: float) -> str:
        x = _LEFT + (_WIDE - _LEFT - _RIGHT) * n / wide
        return f"{x:.1f},{_HIGH - _FLOOR - (_HIGH - _FLOOR - _TOP) * value / high:.1f}"

    def line(points: Iterable[tuple[float, float]], style: str) -> str:
        return f'<polyline points="{" ".join(place(*point) for point in points)}" fill="none" {style}/>'

    def text(n: float, value: float, words: str, more: str) -> str:
        x, y = place(n, value).split(",")
        return f'<text x="{x}" y="{y}" font-size="11" fill="currentColor" {more}>{words}</text>'

    measured = list(zip(scaling.counts, values, strict=True))
    percent = name == "efficiency"
    marks = [0.5, 1.0] if percent else sorted({1, *scaling.counts})
    parts = [
        f'<text x="0" y="12" font-size="12" fill="currentColor">{name}</text>',
        line([(0, high), (0, 0), (wide, 0)], 'stroke="currentColor" stroke-opacity=".4"'),
        line(ideal, 'stroke="currentColor" stroke-dasharray="2 4"'),
        line(fitted, f'stroke="{VERMILLION}" stroke-width="1.5"'),
        line(measured, f'stroke="{BLUE}" stroke-width="1.5" stroke-opacity=".5"'),
        *(text(0, mark, f"{100 * mark:.0f} %" if percent else f"{mark}", 'dx="-5" dy="4" text-anchor="end"')
          for mark in marks),
        *(text(n, 0, str(n), 'dy="14" text-anchor="middle"') for n in scaling.counts),
        text(wide / 2, 0, "ranks", 'dy="27" text-anchor="middle"'),
    ]  # fmt: skip
    if scaling.cpus <= wide:
        side = "end" if scaling.cpus > wide / 2 else "start"
        parts += [
            line([(scaling.cpus, 0), (scaling.cpus, high)], 'stroke="currentColor" stroke-dasharray="6 3"'),
            text(scaling.cpus, high, f" {scaling.cpus} CPUs ", f'dy="-3" text-anchor="{side}"'),
        ]
    for (n, value), seconds in zip(measured, scaling.seconds, strict=True):
        x, y = place(n, value).split(",")
        parts.append(
            f'<circle cx="{x}" cy="{y}" r="4" fill="{BLUE}"><title>{n} ranks: {value:.2f}, '
            f"{seconds:.3g} s</title></circle>"
        )
    about = ", ".join(f"{n}: {value:.2f}" for n, value in measured)
    return (
        f'<svg role="img" aria-label="{name} by ranks, {about}" viewBox="0 0 {_WIDE} {_HIGH}" '
        f'style="width:100%;max-width:{_WIDE}px;height:auto">{"".join(parts)}</svg>'
    )
