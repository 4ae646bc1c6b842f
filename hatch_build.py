"""The README as a page of an index: hatchling runs this when it builds or installs the package.

An index shows the README apart from its repository, where relative links lead nowhere.  The setting
``repository`` in pyproject.toml is the repository's address; while it is empty, links stay as they are.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"""(\]\(|\b(?:src|srcset)=")(?![a-z]+:|#)([^)"\s]+)""")
_PICTURES = (".png", ".svg")


def with_absolute_links(text: str, repository: str) -> str:
    """Return Markdown whose links to files of the repository have its address."""
    if not repository:
        return text

    def absolute(link: re.Match[str]) -> str:
        form = "raw" if link[2].endswith(_PICTURES) else "blob"
        return f"{link[1]}{repository.rstrip('/')}/{form}/HEAD/{link[2]}"

    return _LINK.sub(absolute, text)


class IndexPage(MetadataHookInterface):
    """Fills in the fields of the metadata that need the repository's address."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme` and `urls`."""
        repository = self.config["repository"]
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": with_absolute_links(text, repository),
        }
        pages = {
            "Source": "",
            "Documentation": "/blob/HEAD/docs/index.md",
            "Changes": "/blob/HEAD/CHANGELOG.md",
        }
        metadata["urls"] = {name: f"{repository}{path}" for name, path in pages.items() if repository}
