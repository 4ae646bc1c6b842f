"""Run a notebook in a real kernel, without a browser, and print what its cells show.

Usage: ``python notebooks/tools/run.py NOTEBOOK [--pictures FOLDER]``.  A solution from the
folder ``solutions`` beside it stands in for what a student writes.  Ends with status 1 if a cell raised that
is not a planned mistake, or if a planned mistake (tag ``raises-exception``) did not raise what its metadata
name in ``nbparallel.raises``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from base64 import b64decode
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from traitlets.config import Config

CELL_SECONDS = 120
"""A cell that takes longer is interrupted, and the run fails."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
"""Escape sequences that colour text."""
_FOLD = re.compile(r"</?(?:details|summary)>\n?")
"""Tags of a text that opens by a click."""


class Terminal:
    """Prints a notebook: text as it comes, the final outputs of a cell when it has ended.

    A cell may clear its output and print it again (in rank order).  A terminal then takes back what was
    shown; in a file or a pipe a cell is printed once, when it has ended.
    """

    def __init__(self, pictures: Path) -> None:
        self._pictures = pictures
        self._live = sys.stdout.isatty()
        self._shown = ""

    def markdown(self, text: str) -> None:
        """Print a text cell; what a page folds is shown."""
        print(f"\n{_FOLD.sub('', text)}\n")

    def code(self, text: str) -> None:
        """Print a code cell, before it runs."""
        bar = self._style("2", "│ ")
        print("\n".join(bar + line for line in text.splitlines()), flush=True)

    def arrives(self, text: str) -> None:
        """Show text while the cell runs."""
        if self._live:
            self._shown += text
            print(text, end="", flush=True)

    def ends(self, outputs: list[Any], cell: int) -> None:
        """Show a cell's final outputs."""
        final = "".join(self._text(output, cell, number) for number, output in enumerate(outputs))
        if not final.startswith(self._shown):
            self._take_back()
        print(final[len(self._shown) :], end="", flush=True)
        self._shown = ""

    def _take_back(self) -> None:
        width = shutil.get_terminal_size().columns
        rows = sum(len(_COLOUR.sub("", line)) // width for line in self._shown.split("\n"))
        print(f"\r\x1b[{rows + self._shown.count(chr(10))}A\x1b[J", end="")
        self._shown = ""

    def _text(self, output: Any, cell: int, number: int) -> str:
        if output.output_type == "stream":
            return self._plain(str(output.text))
        if output.output_type == "error":
            return self._plain("\n".join(output.traceback) + "\n")
        for kind, ending in (("image/png", "png"), ("image/svg+xml", "svg")):
            if kind in output.data:
                self._pictures.mkdir(parents=True, exist_ok=True)
                path = self._pictures / f"cell-{cell:02d}-{number}.{ending}"
                data = output.data[kind]
                path.write_bytes(b64decode(data) if ending == "png" else data.encode())
                text = str(output.data.get("text/plain", "<"))
                # a picture may bring its content as text; "<Figure size …>" is none
                shown = "" if text.startswith("<") else f"{text}\n"
                return shown + self._style("2", f"[picture: {os.path.relpath(path)}]") + "\n"
        return f"{output.data.get('text/plain', '')}\n"

    def _plain(self, text: str) -> str:
        return text if self._live else _COLOUR.sub("", text)

    def _style(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._live else text


class Runner(NotebookClient):
    """A client that shows text outputs as they arrive."""

    terminal: Terminal

    def output(self, outs: list[Any], message: dict[str, Any], display_id: str, cell_index: int) -> Any:
        """Keep an output, and show it if it is text."""
        if message["msg_type"] == "stream":
            self.terminal.arrives(message["content"]["text"])
        return super().output(outs, message, display_id, cell_index)


def solved(path: Path) -> Any:
    """Return a notebook with each solution behind the cell that it replaces: each check has to pass."""
    content = nbformat.read(path, as_version=4)
    beside = path.parent / "solutions" / path.name
    cells = nbformat.read(beside, as_version=4).cells if beside.exists() else []
    solutions = iter([cell for cell in cells if "solution" in cell.metadata.get("tags", [])])
    every = []
    for cell in content.cells:
        tags = cell.metadata.get("tags", [])
        every.append(cell)
        if cells and "start" in tags:
            every.append(next(solutions))
        if cells and "check" in tags:
            cell.metadata["tags"] = ["check"]
    content.cells = every
    return content


def planned(cell: Any) -> str:
    """Return the class that a cell raises on purpose; empty if it raises nothing.

    Cells that need a module say which one (``nbparallel.needs``): without it they do nothing.
    """
    plan = cell.metadata.get("nbparallel", {})
    if "raises-exception" not in (tags := cell.metadata.get("tags", [])) or "check" in tags:
        return ""
    if (needed := plan.get("needs")) and find_spec(needed) is None:
        return ""
    return str(plan.get("raises", "an exception"))


def unplanned(cell: Any) -> str:
    """Return what a cell did other than planned; empty if it kept to its plan.

    The class is that of the cell's exception, or of one that ranks raised: the message names both.  Words
    of the message will do as well.
    """
    name = planned(cell)
    error = next((output for output in cell.outputs if output.output_type == "error"), None)
    if not name or (error is not None and re.search(rf"\b{name}\b", f"{error.ename} {error.evalue}")):
        return ""
    raised = "nothing" if error is None else f"{error.ename}: {error.evalue}"
    return f"a cell raised {raised} instead of {name}"


def run(notebook: Path, pictures: Path, scratch: Path) -> bool:
    """Run all cells of `notebook`; return whether all kept to their plan.  The file stays as it is."""
    # this environment's kernel, not one in the user's folder; and none of the user's settings
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        os.environ[name] = str(scratch / name.lower())
    content = solved(notebook)
    folder = {"metadata": {"path": str(notebook.parent)}}
    # files in a folder of ours instead of ports
    config = Config({"AsyncKernelManager": {"transport": "ipc", "ip": str(scratch / "k")}})
    runner = Runner(content, config=config, timeout=CELL_SECONDS, kernel_name="python3", resources=folder)
    terminal = runner.terminal = Terminal(pictures)
    started = time.monotonic()
    cells = mistakes = 0
    failure = ""
    try:
        with runner.setup_kernel():
            for index, cell in enumerate(content.cells):
                if cell.cell_type != "code":
                    terminal.markdown(cell.source)
                    continue
                terminal.code(cell.source)
                try:
                    runner.execute_cell(cell, index)
                finally:
                    terminal.ends(cell.outputs, index)
                if failure := unplanned(cell):
                    break
                cells += 1
                mistakes += bool(planned(cell))
    except CellExecutionError:
        failure = "a cell raised, see above"
    except (CellTimeoutError, DeadKernelError) as error:
        failure = str(error)
    if not failure:
        raised = f"{mistakes} raised as planned" if mistakes else "no cell raised"
        print(f"\n{notebook.name}: {cells} cells in {time.monotonic() - started:.1f} s, {raised}")
        return True
    print(f"\n{notebook.name}: FAILED after {cells} cells: {failure}", file=sys.stderr)
    return False


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--pictures", type=Path, default=Path("build/pictures"), help="where pictures go")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nbp-run-") as scratch:
        return 0 if run(options.notebook, options.pictures, Path(scratch)) else 1


if __name__ == "__main__":
    sys.exit(main())
