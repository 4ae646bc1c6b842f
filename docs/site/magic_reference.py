"""Directives that write the reference of magics and configuration."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from reference_entries import FlagEntry, configuration_rows, magic_entries
from sphinx.util.docutils import SphinxDirective


def _section(anchor: str, title: str, *body: nodes.Node) -> nodes.section:
    section = nodes.section(ids=[anchor], names=[anchor])
    section += nodes.title("", "", nodes.literal(text=title))
    for part in body:
        section += part
    return section


def _links(flags: tuple[FlagEntry, ...]) -> nodes.paragraph:
    """Return a line that leads to flags which another magic has, too."""
    line = nodes.paragraph("", "", nodes.Text("Also, as above: "))
    for number, flag in enumerate(flags):
        if number:
            line += nodes.Text(", ")
        link = nodes.reference("", "", nodes.literal(text=flag.title), refid=flag.anchor, internal=True)
        line += link
    return line


class Magics(SphinxDirective):
    """A section for every magic, and one for each of its flags."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        found: list[nodes.Node] = []
        for magic in magic_entries():
            section = _section(
                magic.anchor,
                magic.title,
                nodes.paragraph("", "", nodes.Text(magic.text)),
                nodes.literal_block(magic.example, magic.example, language="ipython3"),
            )
            if magic.shared:
                section += _links(magic.shared)
            for flag in magic.flags:
                part = _section(flag.anchor, flag.title, nodes.paragraph("", "", nodes.Text(flag.text)))
                self.state.document.note_explicit_target(part)
                section += part
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
