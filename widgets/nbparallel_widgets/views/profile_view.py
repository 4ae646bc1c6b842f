"""A profile as a notebook shows it: the code with a bar beside each line."""

from __future__ import annotations

from dataclasses import dataclass

from nbparallel.distributed.tracing.profiling.profile import LineTimes, Profile, ProfiledLine
from nbparallel.errors.text.escaping import escape_html
from nbparallel_widgets.panel_sheet import STYLE
from nbparallel_widgets.strip import KINDS, share_bar, swatch


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
        body = "".join(
            ('<tr class="nbp-hot">' if line is not None and line is longest else "<tr>")
            + f'<th scope="row" class="nbp-n">{number or "⋮"}</th>'
            f'<td class="nbp-line">{"" if line is None else _bar(line.mean, most)}</td>'
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


def _bar(times: LineTimes, most: float) -> str:
    return share_bar({kind: getattr(times, kind) / most for kind in KINDS}) if most else ""
