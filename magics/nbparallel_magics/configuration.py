"""``%config NbParallel``: the defaults of the magics."""

from __future__ import annotations

import sys
from typing import Any

from traitlets import Bool, Enum, Float, Int, TraitError
from traitlets.config import Config, Configurable


class NbParallel(Configurable):
    """Defaults of ``%%parallel``; a flag in a cell wins over them."""

    n = Int(0, min=0, help="Ranks of a new session; 0: one per CPU that the notebook may use.").tag(
        config=True
    )
    ranks_per_cpu = Int(
        8, min=1, help="More ranks than this for each CPU that the notebook may use are refused."
    ).tag(config=True)
    output = Enum(
        ("rank", "stream"),
        "rank",
        help="rank: output is in rank order when the cell has ended; stream: it stays as it came, which a "
        "log that cannot be cleared needs (papermill.execute_notebook with log_output).",
    ).tag(config=True)
    timeout = Float(0.0, min=0.0, help="Seconds after which a cell is interrupted; 0: never.").tag(
        config=True
    )
    queue = Bool(False, help="Let cells wait for --async cells that run, instead of refusing them.").tag(
        config=True
    )
    quiet = Bool(False, help="Show no output and no values of ranks, only errors.").tag(config=True)
    keep_messages = Bool(
        False, help="Keep messages that no rank received for later cells; else they are dropped, with a note."
    ).tag(config=True)
    welcome = Bool(
        True, help="Show under the first cell which names ranks have, and how many ranks there are."
    ).tag(config=True)
    read_in_place = Bool(
        True,
        help="Let ranks read each other's large private arrays where they lie, in one copy; else such arrays "
        "are copied into shared memory first.",
    ).tag(config=True)
    start_method = Enum(
        ("forkserver", "spawn"),
        "forkserver",
        help="How ranks start: forkserver: forked from a prepared process; spawn: as fresh interpreters.",
    ).tag(config=True)
    warm = Bool(
        True, help="Start the process that ranks are forked from when loaded, not with the first cell."
    ).tag(config=True)


def configured(shell: Any) -> NbParallel:
    """Return the defaults as the shell's configuration has them.

    ``%config NbParallel.output = 'tabs'`` is refused, but IPython keeps the value: what cannot be is
    taken out of the configuration, with a line on stderr, so that the extension can be loaded.
    """
    section = shell.config.get("NbParallel", {})
    for name, value in list(section.items()):
        try:
            NbParallel(config=Config(NbParallel={name: value}))
        except TraitError as error:
            del section[name]
            sys.stderr.write(f"nbparallel: {error} The default is used.\n")
    return NbParallel(parent=shell)
