"""Renew the pictures of the course: after `make docs`, ``python -m docs.site.course_pictures``.

Each lesson has one in ``docs/images/course``: the last that its cells drew, or the one that `WHICH` names,
made small.
"""

from __future__ import annotations

from base64 import b64decode
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "docs" / "images" / "course"
MOST_BYTES = 40_000
WHICH = {"08-measuring": 0, "09-mosaic": 1}
"""The number of a lesson's picture among those that it draws, where it is not the last."""
_PIXELS = (360, 240)


def small(png: bytes) -> bytes:
    """Return a picture in the size of a table's cell, on white, with as many colours as fit."""
    from PIL import Image  # matplotlib brings it

    picture = Image.open(BytesIO(png)).convert("RGBA")
    picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
    picture.thumbnail(_PIXELS, Image.Resampling.LANCZOS)
    for colours in (128, 64, 32, 16):
        written = BytesIO()
        picture.quantize(colours).save(written, "PNG", optimize=True)
        if written.tell() <= MOST_BYTES:
            break
    return written.getvalue()


def main() -> None:
    """Write the picture of each lesson, as the notebooks were last executed for the site."""
    import nbformat
    from jupyter_cache import get_cache

    caches = (ROOT / "build" / "notebook-outputs").glob("*/global.db")
    cache = get_cache(max(caches, key=lambda path: path.stat().st_mtime).parent)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb"))[1:]:  # the first only checks the set-up
        kept = cache.match_cache_notebook(nbformat.read(path, as_version=4))
        cells = cache.get_cache_bundle(kept.pk).nb.cells
        outputs = [output for cell in cells for output in cell.get("outputs", ())]
        drawn = [out.data["image/png"] for out in outputs if "image/png" in out.get("data", {})]
        (FOLDER / f"{path.stem}.png").write_bytes(small(b64decode(drawn[WHICH.get(path.stem, -1)])))


if __name__ == "__main__":
    main()
