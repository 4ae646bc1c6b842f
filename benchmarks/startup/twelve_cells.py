"""Twelve things that people do with a parallel cell, side by side: what it takes, and what comes of it."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.contenders import IPYPARALLEL, NBPARALLEL, RANKS, Contender, Started, started
from benchmarks.report import Figure, Section, human_seconds, installed, not_installed
from benchmarks.startup.first_cell import PAUSE_SECONDS, until_heard
from tests.harness.kernel.kernel_messages import CellOutcome, KernelMessage

PATIENCE = 15.0
"""Seconds after which a cell that should have ended immediately is called one that never ends."""
LINES = 1500
BIG = 200 * 10**6
"""Bytes of the array that goes in, and of what each rank returns."""
OTHERS_SECONDS = 5
"""What the ranks that did not fail would still compute."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one row with one tool."""

    right: bool
    """Whether everything was as a person expects it."""
    seconds: float | None = None
    """How long that took."""
    text: str = ""
    """What else there is to say."""

    def __str__(self) -> str:
        parts = [human_seconds(self.seconds)] if self.seconds is not None else []
        if self.text:
            parts.append(self.text)
        return ("" if self.right else "✗ ") + ", ".join(parts or ["works"])


def left_over(outcome: CellOutcome) -> list[KernelMessage]:
    """Return the messages whose output is on the page when the cell is over."""
    cleared = max((i for i, m in enumerate(outcome.messages) if m.kind == "clear_output"), default=-1)
    return list(outcome.messages[cleared + 1 :])


def shown(outcome: CellOutcome) -> str:
    """Return all the text that a cell left, streams and displays together."""
    parts = []
    for message in left_over(outcome):
        if message.kind == "stream":
            parts.append(message.content["text"])
        elif message.kind in {"display_data", "update_display_data"}:
            parts.append(message.content["data"].get("text/plain", ""))
    return "".join(parts)


def said(outcome: CellOutcome) -> str:
    """Return the beginning of the error that a front end shows last."""
    first = next(iter(outcome.evalue.splitlines()), "")
    return f"{outcome.ename}: {first[:50]}{'…' if len(first) > 50 else ''}"


def run_bounded(running: Started, code: str) -> CellOutcome | None:
    """Run a cell; None if it does not end, after an interrupt or two that brought the kernel back."""
    cell = running.kernel.begin(code)
    try:
        return cell.wait(PATIENCE)
    except TimeoutError:
        for _ in range(3):
            running.kernel.interrupt()
            try:
                cell.wait(PATIENCE / 3)
            except TimeoutError:
                continue
            break
        return None


def works(running: Started, tool: Contender) -> bool:
    """Return whether a next cell runs on all ranks."""
    outcome = run_bounded(running, tool.cell("print(f'rank {rank} is well')"))
    text = shown(outcome) if outcome else ""
    return all(f"rank {rank} is well" in text for rank in range(RANKS))


# -- the rows ------------------------------------------------------------------------------------------------


def start(tool: Contender) -> Result:
    """From nothing to four ranks that have printed, a moment after both tools were imported."""
    with started(tool, ranks=False) as running:
        time.sleep(PAUSE_SECONDS)
        seconds = until_heard(running.kernel, tool.first, [f"rank {rank} is here" for rank in range(RANKS)])
        return Result(True, seconds, f"{len(running.processes()) - 1} processes beside the kernel")


def empty(tool: Contender) -> Result:
    """Run an empty cell, 20 times, through the front end's messages."""
    with started(tool) as running:
        outcomes = [running.kernel.run(tool.cell("pass"), PATIENCE) for _ in range(21)][1:]
        right = all(outcome.status == "ok" for outcome in outcomes)
        return Result(right, statistics.median(outcome.seconds for outcome in outcomes))


def printing(tool: Contender) -> Result:
    """One line from each rank."""
    with started(tool) as running:
        words = [f"rank {rank} says hello" for rank in range(RANKS)]
        code = tool.cell("print(f'rank {rank} says hello')")
        times = []
        for _ in range(11):
            with contextlib.suppress(RuntimeError):  # a line was lost on the way
                times.append(until_heard(running.kernel, code, words))
        lost = 11 - len(times)
        return Result(
            not lost, statistics.median(times), f"a line lost in {lost} of 11 cells" if lost else ""
        )


def plot(tool: Contender) -> Result:
    """Plot on each rank, after a first time that imports matplotlib; the median of five."""
    with started(tool) as running:
        code = tool.cell("import matplotlib.pyplot as plt\nplt.plot([rank, 1])\nplt.show()")
        outcomes = [running.kernel.run(code, 60) for _ in range(6)][1:]
        pictures = [_pictures(outcome) for outcome in outcomes]
        seconds = statistics.median(outcome.seconds for outcome in outcomes)
        return Result(pictures == [RANKS] * len(outcomes), seconds, f"{min(pictures)} pictures")


def _pictures(outcome: CellOutcome) -> int:
    left = (message.content for message in left_over(outcome) if message.kind == "display_data")
    return sum("image/png" in content["data"] for content in left)


def lines(tool: Contender) -> Result:
    """1,500 lines from each rank."""
    with started(tool) as running:
        body = f"for i in range({LINES}): print(f'rank {{rank}} line {{i:04}} of a longer loop', flush=True)"
        outcome = running.kernel.run(tool.cell(body), 120)
        printed = RANKS * LINES * len("rank 0 line 0000 of a longer loop\n")
        sent = sum(
            len(message.content.get("text", "") or str(message.content.get("data", "")))
            for message in outcome.messages
            if message.kind in {"stream", "display_data", "update_display_data"}
        )
        text = shown(outcome)
        complete = all(f"rank {r} line {i:04}" in text for r in range(RANKS) for i in range(LINES))
        note = f"{sent / printed:.1f} bytes sent for each printed" + ("" if complete else "; lines lost")
        return Result(complete, outcome.seconds, note)


def arrays(tool: Contender) -> Result:
    """200 MB of the notebook to all ranks, and as much back from each."""
    with started(tool) as running:
        running.kernel.run(f"import numpy as np\nbig = np.ones({BIG // 8})", PATIENCE)
        running.kernel.run(tool.cell("import numpy as np"), PATIENCE)
        outcomes = [running.kernel.run(code, 120) for code in (tool.inward, tool.outward)]
        check = running.kernel.run(f"[float(a[-1]) for a in back] == [1 + r for r in range({RANKS})]", 60)
        right = check.result == "True"
        took = [outcome.seconds for outcome in outcomes]
        note = f"in and computed {human_seconds(took[0])}, back {human_seconds(took[1])}"
        return Result(right, sum(took), note)


def failure(tool: Contender) -> Result:
    """Rank 0 fails immediately while the others compute."""
    with started(tool) as running:
        body = (
            "import time\nif rank == 0: 1 / 0\n"
            f"end = time.time() + {OTHERS_SECONDS}\nwhile time.time() < end: pass"
        )
        outcome = running.kernel.run(tool.cell(body), 60)
        named = "ZeroDivisionError" in outcome.ename + outcome.evalue
        right = outcome.status == "error" and named and outcome.seconds < OTHERS_SECONDS
        note = f"the cell says {said(outcome)}"
        return Result(right and works(running, tool), outcome.seconds, note)


def interrupt(tool: Contender) -> Result:
    """Press the stop button while all sleep; then the next cell."""
    with started(tool) as running:
        cell = running.kernel.begin(tool.cell("import time\nkept = rank\ntime.sleep(600)"))
        time.sleep(1)
        pressed = time.monotonic()
        running.kernel.interrupt()
        try:
            outcome = cell.wait(PATIENCE)
        except TimeoutError:
            return Result(False, None, "does not end")
        seconds = time.monotonic() - pressed
        kept = shown(running.kernel.run(tool.cell("print(f'{kept} kept')"), PATIENCE))
        all_kept = all(f"{rank} kept" in kept for rank in range(RANKS))
        note = f"the cell says {outcome.ename or 'ok: Run All goes on'}" + (
            "" if all_kept else "; the next cell does not print"
        )
        return Result(outcome.ename == "KeyboardInterrupt" and all_kept, seconds, note)


def killed_rank(tool: Contender) -> Result:
    """Rank 1 is killed in a cell; then the next cell."""
    with started(tool) as running:
        body = "import os, signal, time\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(2)"
        begun = time.monotonic()
        outcome = run_bounded(running, tool.cell(body))
        seconds = time.monotonic() - begun
        well = works(running, tool)
        note = "" if outcome and outcome.status == "error" else "the cell does not say so; "
        note += "the next cell runs on all four" if well else "the next cell does not run on all four"
        return Result(well and bool(outcome and outcome.status == "error"), seconds, note)


def awaiting(tool: Contender) -> Result:
    """``await`` at the top level of a cell."""
    with started(tool) as running:
        body = "import asyncio\nawait asyncio.sleep(0.01)\nprint(f'rank {rank} slept')"
        outcome = run_bounded(running, tool.cell(body))
        if outcome is None:
            return Result(False, None, f"did not end in {PATIENCE:g} s")
        return Result(all(f"rank {rank} slept" in shown(outcome) for rank in range(RANKS)), outcome.seconds)


def asking(tool: Contender) -> Result:
    """``input()`` on one rank."""
    with started(tool) as running:
        code = tool.cell(
            "answer = input('how many? ') if rank == 0 else None\nif rank == 0: print('got', answer)"
        )
        cell = running.kernel.begin(code, allow_stdin=True)
        try:
            running.kernel.question(5)
        except TimeoutError:
            outcome = cell.wait(PATIENCE)
            return Result(False, None, said(outcome))
        running.kernel.answer("42")
        return Result("got 42" in shown(cell.wait(PATIENCE)))


def killed_kernel(tool: Contender) -> Result:
    """Kill the kernel while ranks compute: processes left two seconds later."""
    with started(tool) as running:
        running.kernel.begin(tool.cell("while True: pass"))
        time.sleep(1)
        running.kernel.kill()
        time.sleep(2)
        left = len(running.processes())
        return Result(left == 0, None, f"{left} left")


ROWS: dict[str, Callable[[Contender], Result]] = {
    f"start, {PAUSE_SECONDS:g} s after loading, until all four have printed": start,
    "empty cell, median of 20": empty,
    "a line from each rank": printing,
    "a plot from each rank": plot,
    f"{LINES:,} lines from each rank": lines,
    "200 MB in, 4 × 200 MB back": arrays,
    f"error on rank 0, others would go on for {OTHERS_SECONDS} s": failure,
    "interrupt of all, then the next cell": interrupt,
    "SIGKILL of rank 1, then the next cell": killed_rank,
    "`await`": awaiting,
    "`input()` on rank 0": asking,
    "SIGKILL of the kernel, 2 s later": killed_kernel,
}


def middle(results: list[Result]) -> Result:
    """Return the run with the median time, or one that went wrong if any did."""
    wrong = [result for result in results if not result.right]
    timed = sorted(wrong or results, key=lambda result: result.seconds or 0.0)
    return timed[len(timed) // 2]


def row(name: str, measure: Callable[[Contender], Result], launches: int, peer: bool) -> Figure:
    """Measure both tools `launches` times, taking turns."""
    ours, theirs = [], []
    for _ in range(launches):
        ours.append(measure(NBPARALLEL))
        if peer:
            theirs.append(measure(IPYPARALLEL))
    mine = middle(ours)
    if not peer:
        return Figure(name, str(mine), not_installed("ipyparallel"), None, "right", mine.right)
    other = middle(theirs)
    ratio = other.seconds / mine.seconds if other.seconds and mine.seconds else None
    ahead = mine.right and (not other.right or ratio is None or ratio > 1)
    return Figure(name, str(mine), f"ipyparallel: {other}", ratio, "right, and ahead", ahead)


def run(*, quick: bool) -> Section:
    """Measure every row on fresh kernels."""
    peer = installed("ipyparallel")
    figures = [row(name, measure, 1 if quick else 3, peer) for name, measure in ROWS.items()]
    return Section(
        "Twelve cells side by side",
        figures,
        "A fresh kernel for every row and launch, through the messages that a front end would get. "
        "✗: not as a person expects it. The median launch, or the one that went wrong. "
        "jupyter-distributed runs cells through its own JupyterLab extension and server, not in a kernel "
        "alone: it could not be measured like this; docs/get-started/which-tool.md has what both did in "
        "JupyterLab.",
    )
