"""A notebook in JupyterLab, in a browser: cells that run, and what a person would see of them.

What a person does is done through JupyterLab's own commands (`jupyterapp`, which the server is asked to
expose), and every wait is for an event of the page: the end of a cell, a text that appears, a theme.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Locator, Page

    from tests.widgets.lab.server import LabServer

PAGE_SECONDS = 60.0
"""JupyterLab's page is there, with a kernel, after about four seconds."""
CELL_SECONDS = 30.0
"""A cell that takes longer hangs."""
THEMES = {
    "light": "JupyterLab Light",
    "dark": "JupyterLab Dark",
    "contrast": "JupyterLab Dark High Contrast",
}
_READY = """() => {
    const panel = window.jupyterapp?.shell?.currentWidget;
    return panel?.context?.isReady && panel.sessionContext?.isReady
        && panel.sessionContext.session?.kernel?.connectionStatus === "connected";
}"""
_BEGIN = """source => {
    const panel = jupyterapp.shell.currentWidget, notebook = panel.content;
    let index = notebook.widgets.length - 1;
    notebook.activeCellIndex = index;
    if (notebook.activeCell.model.sharedModel.getSource() !== "") {
        jupyterapp.commands.execute("notebook:insert-cell-below");
        index += 1;
    }
    notebook.activeCell.model.sharedModel.setSource(source);
    window.runsOfTests ??= {};
    window.runsOfTests[index] = jupyterapp.commands.execute("notebook:run-cell");
    return index;
}"""
_WAIT = """([index, seconds]) => Promise.race([
    window.runsOfTests[index],
    new Promise((_, reject) => setTimeout(
        () => reject(new Error(`cell ${index} has not ended after ${seconds} s`)), 1000 * seconds)),
])"""
_OUTPUTS = "index => jupyterapp.shell.currentWidget.content.widgets[index].model.outputs.toJSON()"
_SAVE = 'async () => { await jupyterapp.commands.execute("docmanager:save"); }'
_THEME = 'async name => { await jupyterapp.commands.execute("apputils:change-theme", { theme: name }); }'
# with the splash gone: JupyterLab removes it twice if the next theme is chosen before that
_THEME_SHOWN = """name => document.body.dataset.jpThemeName === name
    && !document.querySelector("#jupyterlab-splash")"""

# JupyterLab lays its panels out some time after the window has changed; 33 pixels on the right are its tabs'
_LAID_OUT = """() => {
    const beside = innerWidth - jupyterapp.shell.currentWidget.node.getBoundingClientRect().right;
    return 0 <= beside && beside < 60;
}"""


class LabCell:
    """One code cell of the page."""

    def __init__(self, notebook: NotebookPage, index: int) -> None:
        self._notebook, self._index = notebook, index
        self.node: Locator = notebook.page.locator(".jp-Notebook .jp-Cell").nth(index)
        """The whole cell."""
        self.output: Locator = self.node.locator(".jp-Cell-outputArea")
        """What stands below its source."""

    @property
    def text(self) -> str:
        """What a person reads below the cell."""
        return self.output.inner_text()

    @property
    def outputs(self) -> list[dict[str, Any]]:
        """The outputs as they would be saved."""
        found: list[dict[str, Any]] = self._notebook.page.evaluate(_OUTPUTS, self._index)
        return found

    def wait(self, seconds: float = CELL_SECONDS) -> LabCell:
        """Wait until a cell that `NotebookPage.begin` began has ended."""
        self._notebook.page.evaluate(_WAIT, [self._index, seconds])
        return self

    def wait_for_text(self, text: str, seconds: float = CELL_SECONDS) -> None:
        """Wait until this can be read below the cell, also while it runs."""
        self.output.get_by_text(text).first.wait_for(timeout=1000 * seconds)

    def violations(self) -> str:
        """Return what axe-core finds in the outputs, as text; empty if it finds nothing."""
        from axe_playwright_python.sync_playwright import Axe

        self.output.scroll_into_view_if_needed()
        self.output.evaluate("node => node.setAttribute('data-examined', '')")
        try:
            found = Axe().run(self._notebook.page, context="[data-examined] .jp-OutputArea-output")
        finally:
            self.output.evaluate("node => node.removeAttribute('data-examined')")
        return found.generate_report() if found.violations_count else ""

    def picture(self, path: Path) -> bytes:
        """Write what stands below the cell as a PNG; return it as well."""
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = self.output.screenshot()  # animations go on: their end is what a page shows much later
        path.write_bytes(picture)  # Playwright would write it in a thread that stays
        return picture


class NotebookPage:
    """A notebook that is open in a browser.

    Attributes
    ----------
    page : playwright.sync_api.Page
        The page, for what is not here.
    failures : list of str
        What the page's scripts threw.
    """

    def __init__(self, context: BrowserContext, server: LabServer, name: str) -> None:
        self.server, self.name = server, name
        self.page: Page = context.new_page()
        self.failures: list[str] = []
        self.page.on("pageerror", lambda error: self.failures.append(str(error) + (error.stack or "")))
        self.page.goto(server.address(name), timeout=1000 * PAGE_SECONDS)
        self.page.wait_for_function(_READY, timeout=1000 * PAGE_SECONDS)
        # JupyterLab's body has no height and hides what is outside: to axe-core nothing would be visible
        self.page.add_style_tag(content="body { height: 100vh }")

    def cell(self, index: int) -> LabCell:
        """Return a cell by its place on the page."""
        return LabCell(self, index)

    def begin(self, source: str) -> LabCell:
        """Type a cell at the end of the notebook and run it; return while it runs."""
        index: int = self.page.evaluate(_BEGIN, source)
        return LabCell(self, index)

    def run(self, source: str, seconds: float = CELL_SECONDS) -> LabCell:
        """Type a cell at the end of the notebook, run it and wait for its end."""
        return self.begin(source).wait(seconds)

    def save(self) -> Any:
        """Save the notebook; return what is in the file."""
        self.page.evaluate(_SAVE)
        return self.server.read(self.name)

    def resize(self, width: int) -> None:
        """Make the page as wide as a window of `width` pixels."""
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.wait_for_function(_LAID_OUT, timeout=1000 * CELL_SECONDS)

    def use_theme(self, theme: str) -> None:
        """Choose one of `THEMES`."""
        self.page.evaluate(_THEME, THEMES[theme])
        self.page.wait_for_function(_THEME_SHOWN, arg=THEMES[theme], timeout=1000 * CELL_SECONDS)

    def close(self) -> None:
        """Close the page; the kernel goes on, as it does for a person."""
        self.page.close()
