"""Writing of labelled pieces: where a label is due, and where a line must be ended first."""

from __future__ import annotations

from collections.abc import Sequence

from nbparallel_magics.output.layout import Piece, Rich, Text, fits_behind_label
from nbparallel_magics.output.publisher import Publisher


class BlockWriter:
    """Writes pieces behind the last one shown; not thread-safe, its owner holds a lock."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self.shown: list[Piece] = []
        """What is on the screen, one piece for each label."""
        self.size = 0
        """Characters of text that were shown, also those that were taken back."""
        self.on_page = 0
        """Characters of text that are shown now."""
        self.live = ""
        """The lines that change while they are shown, as they were shown last."""
        self._continuable = False
        self._unended: str | None = None  # the stream whose last line has no end yet

    def show_again(self, pieces: Sequence[Piece]) -> None:
        """Clear the output and show `pieces` instead."""
        self._publisher.clear(then_more=bool(pieces))
        self.shown, self._continuable, self._unended, self.live = [], False, None, ""
        self.on_page = 0
        self.show(pieces)

    def show(self, pieces: Sequence[Piece]) -> None:
        """Show more; text of the same ranks and stream goes on where it was, in few messages."""
        buffered: list[tuple[str, str]] = []
        for piece in pieces:
            if isinstance(piece.item, Text):
                self._add(buffered, piece.item.name, self._labelled(piece, piece.item))
            elif piece.item.data.keys() == {"text/plain"} and piece.item.is_value:
                self._add(buffered, "stdout", self._value(piece, str(piece.item.data["text/plain"])))
            else:
                self._add(buffered, "stdout", f"{self._ended('stdout')}{piece.label}\n")
                self._flush(buffered)
                self._show_rich(piece, piece.item)
        self._flush(buffered)

    def show_live(self, text: str, *, last: bool = False) -> None:
        """Show lines that may change, in the place of those that were shown so before; `last`: they stay."""
        if text == self.live and not (last and text):
            return
        if not self.live:
            if ended := self._ended("stdout"):
                self._publisher.stream("stdout", ended)
            self._continuable = False
        self._publisher.live(text, last=last)
        self.live = "" if last else text

    def update(self, new: Rich) -> None:
        """Replace a display that has the same identity."""
        identity = new.transient.get("display_id")
        for index, piece in enumerate(self.shown):
            if isinstance(piece.item, Rich) and piece.item.transient.get("display_id") == identity:
                self.shown[index] = Piece(piece.ranks, new)
        self._publisher.update(new.data, new.metadata, new.transient)

    def forget(self) -> None:
        """Drop all pieces but the last one, which may be continued."""
        del self.shown[:-1]
        if self.shown and isinstance(item := self.shown[0].item, Text):
            self.shown[0] = Piece(self.shown[0].ranks, Text(item.name, item.text[-1:]))

    def after(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return what `shown` would be after ``show(pieces)``."""
        shown, continuable = list(self.shown), self._continuable
        for piece in pieces:
            continuable = _push(shown, piece, continuable)
        return shown

    def _labelled(self, piece: Piece, item: Text) -> str:
        goes_on = self._continuable and _same_place(self.shown[-1], piece)
        if goes_on:
            text = item.text
        elif not piece.ranks:
            text = f"{self._ended(item.name)}{item.text}"
        else:
            gap = " " if fits_behind_label(item.text) else "\n"
            text = f"{self._ended(item.name)}{piece.label}{gap}{item.text}"
        self._continuable = _push(self.shown, piece, self._continuable)
        self._unended = None if text.endswith("\n") else item.name
        return text

    def _value(self, piece: Piece, value: str) -> str:
        ended = self._ended("stdout")
        self._continuable = _push(self.shown, piece, False)
        self._unended = None
        return f"{ended}{piece.label}{chr(10) if chr(10) in value else ' '}{value}\n"

    def _show_rich(self, piece: Piece, item: Rich) -> None:
        self._continuable = _push(self.shown, piece, False)
        self._unended = None
        self._publisher.display(item.data, item.metadata, item.transient)

    def _ended(self, name: str) -> str:
        """Return the end of the line that is open; another stream begins a new line in a notebook."""
        apart = self._publisher.separate_streams and self._unended != name
        needs_end = self._unended is not None and not apart
        self._unended = None
        return "\n" if needs_end else ""

    def _add(self, buffered: list[tuple[str, str]], name: str, text: str) -> None:
        if buffered and buffered[-1][0] == name:
            buffered[-1] = (name, buffered[-1][1] + text)
        else:
            buffered.append((name, text))

    def _flush(self, buffered: list[tuple[str, str]]) -> None:
        for name, text in buffered:
            self.size += len(text)
            self.on_page += len(text)
            self._publisher.stream(name, text)
        buffered.clear()


def _same_place(last: Piece, piece: Piece) -> bool:
    return (
        isinstance(last.item, Text)
        and isinstance(piece.item, Text)
        and last.ranks == piece.ranks
        and last.item.name == piece.item.name
    )


def _push(shown: list[Piece], piece: Piece, continuable: bool) -> bool:
    """Add a piece as a person sees it, and say whether more of the same can follow without a label.

    A whole line behind its label is closed: the next line gets its own label, as in a log.
    """
    if isinstance(piece.item, Rich):
        shown.append(piece)
        return False
    if continuable and shown and _same_place(shown[-1], piece):
        last = shown[-1].item
        text = (last.text if isinstance(last, Text) else "") + piece.item.text
        was_behind = isinstance(last, Text) and fits_behind_label(last.text)
        tidy = shown[-1].tidy and (not was_behind or fits_behind_label(text))
        shown[-1] = Piece(piece.ranks, Text(piece.item.name, text), tidy)
        # an open line behind its label ends with its end; a block below its label goes on
        return not (text.endswith("\n") and fits_behind_label(text))
    shown.append(piece)
    return not (piece.item.text.endswith("\n") and fits_behind_label(piece.item.text))
