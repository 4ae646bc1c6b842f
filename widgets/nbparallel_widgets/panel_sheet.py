"""What of a panel never changes: its style sheet, and the folds below it.

A front end that shows a new figure replaces the whole output that it stands in, and with it whatever was
opened or had the keyboard's focus.  So what a user touches is an output of its own, which is never replaced:
two ``<details>``, empty but for their names.  What they open is in another output; it is shown as long as
they are open by a rule of the style sheet (``:has``).  Where style sheets are removed (GitHub), it is shown.

The columns depend on the width of the panel, not of the window: three layouts, none of which clips anything.
"""

from __future__ import annotations

import re

FOLDS = {
    "segments": "segments and memory of each rank",
    "matrices": "which rank waited for which, and sent to which",
}
"""What can be opened, with what it is called."""

STYLE = """<style>
.nbp{padding-left:7px;color:inherit;container-type:inline-size;font-size:13px;line-height:1.5;
font-variant-numeric:tabular-nums}
.nbp.nbp table{display:block;color:inherit;width:100%;margin:0;border:0;table-layout:auto;font-size:inherit}
.nbp.nbp caption{display:block;text-align:left;padding:2px 0 4px;font-size:14px;color:inherit;
white-space:normal}
.nbp.nbp thead,.nbp.nbp tbody{display:block;border:0}
.nbp.nbp .nbp-grid,.nbp.nbp .nbp-grid thead,.nbp.nbp .nbp-grid tbody{display:revert;width:auto}
.nbp.nbp .nbp-grid caption{display:table-caption;white-space:nowrap;font-weight:bold}
.nbp.nbp tr,.nbp.nbp thead tr{background:none;border:0}
.nbp.nbp .nbp-ranks tbody tr{background:none}
.nbp.nbp .nbp-ranks tr{display:grid;align-items:center;padding:1px 0;
grid-template-columns:5.5em minmax(8em,1fr) repeat(3,6.6em) 7.4em 22em}
.nbp.nbp .nbp-ranks .nbp-marked{margin-left:-7px;border-left:3px solid #D55E00;padding-left:4px}
.nbp.nbp th,.nbp.nbp td{border:0;padding:1px 5px;text-align:left;vertical-align:middle;max-width:none;
white-space:nowrap;line-height:1.5;min-width:0}
.nbp.nbp thead th{font-weight:normal}
.nbp.nbp .nbp-ranks th,.nbp.nbp .nbp-ranks td{display:block}
.nbp.nbp .nbp-n{text-align:right}
.nbp.nbp .nbp-ranks .nbp-state{white-space:normal;padding-left:12px}
.nbp.nbp .nbp-rank{padding-left:0}
.nbp.nbp p{margin:2px 0}
.nbp-axis{position:relative;height:1.5em;font-weight:normal}
.nbp-axis span{position:absolute;white-space:nowrap}
.nbp-memory{display:flex;flex-wrap:wrap;align-items:center;gap:2px 12px;padding-top:6px}
.nbp-memory>div{flex:1 1 8em;max-width:24em}
.nbp-scroll{overflow-x:auto;margin-bottom:8px}
.nbp-folds{display:flex;flex-wrap:wrap;gap:2px 24px}
.nbp-folds summary{cursor:pointer}
.nbp.nbp code{white-space:nowrap}
.nbp-stale{visibility:hidden;height:0;overflow:hidden;animation:nbp-stale 0s 5s forwards}
@keyframes nbp-stale{to{visibility:visible;height:auto}}
.nbp-press{display:none}
#main .nbp-word{display:none}
#main .nbp-press{display:inline-block!important;font:inherit;color:inherit;background:none;border:1px solid;
border-radius:3px;padding:0 8px;cursor:pointer}
@container (max-width:72em){
.nbp.nbp .nbp-ranks tr{grid-template-columns:6em 5.6em 5.4em 7em 1fr;column-gap:4px;padding-bottom:4px}
.nbp.nbp .nbp-ranks .nbp-bar{grid-column:2/-1}
.nbp.nbp .nbp-ranks .nbp-n,.nbp.nbp .nbp-ranks .nbp-state{font-size:12px}
.nbp.nbp .nbp-ranks th.nbp-state{position:absolute;clip-path:inset(50%)}}
@container (max-width:42em){
.nbp.nbp .nbp-ranks tr{grid-template-columns:1.1fr 1fr .95fr 1fr;column-gap:9px}
.nbp.nbp .nbp-ranks thead tr{align-items:end}
.nbp.nbp .nbp-ranks .nbp-state{grid-column:1/-1;padding-left:0}
.nbp.nbp .nbp-ranks .nbp-n{padding:1px 0}
.nbp.nbp .nbp-ranks th.nbp-n{font-size:11px}
.nbp.nbp .nbp-ranks th.nbp-own{white-space:normal;line-height:1.2}}
</style>"""
"""Sent once with a panel, not with each of its figures."""

STALE = (
    '<div class="nbp"><p class="nbp-stale">No news for 5 s: after the page was loaded again or the kernel '
    "was restarted, or in another window, this panel stands still. <code>%parallel_panel</code> shows it as "
    "it is.</p></div>"
)
"""Shown by the style sheet if a figure of a cell that runs is not replaced by the next one."""

INTERRUPT = (
    '<button type="button" class="nbp-press" style="display:none" '
    'data-commandlinker-command="notebook:interrupt-kernel">■ interrupt</button>'
)
"""Runs JupyterLab's own command, also while a cell runs; no other front end shows it."""

HOW = (
    '<span class="nbp-word">■ in the toolbar, or I I, interrupts the ranks; </span>'
    "<code>%parallel_panel --close</code> closes the panel; "
    "after you load the page again, call <code>%parallel_panel</code> again"
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


def details_html(contents: dict[str, str]) -> str:
    """Return folds with what they open, for what is shown once."""
    return "".join(
        f"<details><summary>{FOLDS[name]}</summary>{content}</details>" for name, content in contents.items()
    )
