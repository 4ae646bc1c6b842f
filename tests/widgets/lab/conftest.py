"""A real JupyterLab in a headless Chromium, where both are installed; else a test says what lacks."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.widgets.lab.notebook_page import NotebookPage
from tests.widgets.lab.server import LabServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext

BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
WIDTHS = (400, 700, 1400)
_NEEDED = {
    "jupyterlab": "jupyterlab",
    "playwright": "playwright",
    "axe_playwright_python": "axe-playwright-python",
}
_HERE = Path(__file__).parent


def browser_path() -> str | None:
    """Return the path of an installed Chromium; None if there is none."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def lacking() -> str:
    """Return what is not installed, with how to install it; empty if nothing lacks."""
    packages = [name for module, name in _NEEDED.items() if importlib.util.find_spec(module) is None]
    parts = [f"no {', '.join(packages)} (make test-lab installs them)"] if packages else []
    if browser_path() is None:
        parts.append("no Chromium (apt-get install chromium)")
    return " and ".join(parts)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave these tests out of the quick tier; each has the time that a page needs."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.time_limit(120))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say loudly that nothing was tried in a browser."""
    if what := lacking():
        terminalreporter.write_line(f"NOT TESTED IN JUPYTERLAB: {what}", red=True)


@pytest.fixture(scope="session")
def lab() -> Iterator[LabServer]:
    """Start a JupyterLab for all tests of this folder."""
    if what := lacking():
        pytest.skip(f"not tested in JupyterLab: {what}")
    with LabServer() as server:
        yield server


@pytest.fixture(scope="module")
def browser(lab: LabServer) -> Iterator[Browser]:
    """Start a Chromium; for a module, since Playwright's event loop would be in the way of others'."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=browser_path(), args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        )
        yield chromium
        chromium.close()


@pytest.fixture
def open_notebook(lab: LabServer, browser: Browser) -> Iterator[Callable[..., NotebookPage]]:
    """Return a function that opens a notebook: ``open_notebook("name.ipynb")``, a new one if there is none.

    The notebooks' kernels end with the test; one that leaves a process behind fails it.  So does an exception
    in a script of a page.
    """
    context: BrowserContext = browser.new_context(viewport={"width": 1000, "height": 900})
    opened: list[NotebookPage] = []

    def open_one(name: str = "test.ipynb") -> NotebookPage:
        if not (lab.notebooks / name).exists():
            lab.write(name, "")
        opened.append(NotebookPage(context, lab, name))
        return opened[-1]

    yield open_one
    context.close()
    lab.end_kernels()
    lab.reset()
    assert [failure for page in opened for failure in page.failures] == []


@pytest.fixture
def notebook(open_notebook: Callable[..., NotebookPage]) -> NotebookPage:
    """Return a new notebook with a kernel, in which the extension is loaded."""
    page = open_notebook()
    page.run("%load_ext nbparallel")
    return page


@pytest.fixture
def pictures(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the folder for a test's pictures; ``make test-lab`` keeps them in ``build/screenshots``."""
    kept = os.environ.get("NBP_SCREENSHOTS")
    return Path(kept) / request.node.name if kept else tmp_path / "pictures"
