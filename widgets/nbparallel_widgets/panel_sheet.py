"""What of a panel never changes: its style sheet, and the folds below it.

A front end that shows a new figure replaces the whole output that it stands in, and with it whatever was
opened or had the keyboard's focus.  So what a user touches is an output of its own, which is never replaced:
two ``<details>``, empty but for their names.  What they open is in another output; it is shown as long as
they are open by a rule of the style sheet (``:has``).  Where style sheets are removed (GitHub), it is shown.

The columns depend on the width of the panel, not of the window: three layouts, none of which clips anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from nbparallel.errors.text.escaping import escape_html
from nbparallel_widgets.palette import BLUE, VERMILLION

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
