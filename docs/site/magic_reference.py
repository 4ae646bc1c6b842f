"""Directives that write the reference of magics and configuration."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from reference_entries import configuration_rows, magic_sections
from sphinx.util.docutils import SphinxDirective


class Magics(SphinxDirective):
    """A section for every magic, with its help."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        found: list[nodes.Node] = []
        for anchor, title, text in magic_sections():
            section = nodes.section(ids=[anchor], names=[anchor])
            section += nodes.title("", "", nodes.literal(text=title))
            section += nodes.literal_block(text, text, language="text")
            self.state.document.note_explicit_target(section)
            found.append(section)
        return found


class Configuration(SphinxDirective):
    """A section for every option."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        found: list[nodes.Node] = []
        for name, kind, default, text in configuration_rows():
            section = nodes.section(ids=[name.replace("_", "-")], names=[name])
            section += nodes.title("", "", nodes.literal(text=name))
            section += nodes.paragraph("", "", nodes.Text(text))
            values = [nodes.Text("Default: "), nodes.literal(text=default), nodes.Text(f"; takes {kind}.")]
            section += nodes.paragraph("", "", *values)
            found.append(section)
        return found


def setup(app: Any) -> dict[str, bool]:
    """Add both directives."""
    app.add_directive("magics", Magics)
    app.add_directive("configuration", Configuration)
    return {"parallel_read_safe": True}
