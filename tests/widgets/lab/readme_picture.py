"""Make README's picture, the panel while a cell runs, in JupyterLab: ``make picture``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.widgets.lab.conftest import browser_path, lacking
from tests.widgets.lab.notebook_page import NotebookPage
from tests.widgets.lab.server import LabServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser

IMAGES = Path(__file__).resolve().parents[3] / "docs" / "images"
WIDTH = 900
SUM = """\
%%parallel -n 4 -o parts
part = dist.shard(x)                      # a quarter of x: the same memory, no copy
total = all_reduce(float(part.sum()))     # every rank gets the sum of all four
print(f"rank {rank} summed {part.size:,} numbers, all together {total:+.3f}")
part.sum()"""
UNEVEN = """\
%%parallel
for step in range(500 if rank == 2 else 5):   # one rank has more to do
    np.sort(part)
barrier()"""
SAMPLE = "import numpy as np\nx = np.random.default_rng(0).normal(size=4_000_000)"


def take(browser: Browser, lab: LabServer, theme: str) -> bytes:
    """Return a PNG of the notebook in one of `notebook_page.THEMES`, while rank 2 lets the others wait."""
    context = browser.new_context(viewport={"width": WIDTH, "height": 1400}, device_scale_factor=1.5)
    try:
        page = NotebookPage(context, lab, f"{theme}.ipynb")
        page.use_theme(theme)
        page.run("%load_ext nbparallel\n" + SAMPLE)
        page.run(SUM)
        panel = page.run("%parallel_panel")
        running = page.begin(UNEVEN)
        panel.wait_for_text("holds the others up")
        boxes = [box for part in (panel, running) if (box := part.node.bounding_box())]
        left, top = boxes[0]["x"], boxes[0]["y"]
        width, height = boxes[0]["width"], boxes[-1]["y"] + boxes[-1]["height"] - top
        picture = page.page.screenshot(clip={"x": left, "y": top, "width": width, "height": height})
        page.page.evaluate("() => jupyterapp.commands.execute('notebook:interrupt-kernel')")
        running.wait()
        return picture
    finally:
        context.close()
        lab.end_kernels()


def main(folder: Path = IMAGES) -> int:
    """Write the picture for light and for dark pages."""
    if what := lacking():
        print(f"no picture: {what}", file=sys.stderr)
        return 1
    from playwright.sync_api import sync_playwright

    folder.mkdir(parents=True, exist_ok=True)
    with LabServer() as lab, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path(), args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        )
        for theme in ("light", "dark"):
            lab.write(f"{theme}.ipynb", "")
            (folder / f"cell-{theme}.png").write_bytes(take(browser, lab, theme))
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
