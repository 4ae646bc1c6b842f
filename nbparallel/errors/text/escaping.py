"""Escaping: text of users made fit for messages (UTF-8), and for HTML and SVG.

Standard library only, and cheap to import: every error imports it.
"""

from __future__ import annotations

_RANGES = (
    *((0x00, 0x08), (0x0B, 0x1F), (0x7F, 0x9F)),  # control characters: XML allows none of them
    *((0x61C, 0x61C), (0x200E, 0x200F), (0x202A, 0x202E), (0x2066, 0x2069)),  # turn the text around them
    *((0xD800, 0xDFFF), (0xFFFE, 0xFFFF)),  # halves of pairs, and no characters
)
"""First and last of the characters that cannot be seen."""


class _Escapes(dict[int, int | str]):
    """For each character, by its number, what stands for it (`str.translate`)."""

    def __missing__(self, code: int) -> int | str:
        hidden = any(first <= code <= last for first, last in _RANGES)
        self[code] = code if not hidden else f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
        return self[code]


_escapes = _Escapes()


def encodable(text: str) -> str:
    r"""Return text that UTF-8 can hold: lone surrogates are escaped.

    >>> encodable("a\ud800b")
    'a\\ud800b'
    """
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def visible(text: str) -> str:
    r"""Return text in which every character is seen: others are escaped, but for line ends and tabs.

    >>> visible("a\x07\u202eb")
    'a\\x07\\u202eb'
    """
    return text if text.isprintable() else text.translate(_escapes)


def escape_html(text: str) -> str:
    """Return text as part of HTML or SVG, also inside of a quoted attribute."""
    import html

    return html.escape(visible(text))
