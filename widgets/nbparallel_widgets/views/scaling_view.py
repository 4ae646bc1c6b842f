"""How much faster more ranks are, as a picture: speed-up and efficiency beside the ideal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from nbparallel.errors.text.escaping import escape_html
from nbparallel.session.diagnostics.speedup import Scaling
from nbparallel_widgets.palette import BLUE, VERMILLION
from nbparallel_widgets.panel_sheet import STYLE

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
