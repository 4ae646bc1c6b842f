"""The output of one cell on several ranks: shown as it arrives, then in its final order.

While the cell runs, new output is shown at least every `INTERVAL`; at its end it is in rank order.  A cell
that is over before the first time is simply shown once, in its final form.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from typing import Any

from nbparallel.errors import labelled_ranks
from nbparallel.errors.text.escaping import encodable
from nbparallel_magics.output.layout import (
    NO_RANK,
    Arrival,
    Item,
    LiveLines,
    Piece,
    Progress,
    Rich,
    Text,
    arrange,
    as_items,
    before_moves,
    beginning,
    fits_behind_label,
    in_arrival_order,
    is_value,
    last_state,
    rows_above,
)
from nbparallel_magics.output.overflow import LogFolder, OverflowLog
from nbparallel_magics.output.publisher import Publisher

_INVISIBLE = re.compile(r"<(style|script)\b.*?</\1>|<!--.*?-->", re.DOTALL | re.IGNORECASE)
"""HTML that shows nothing."""
_NOTE = "note"
"""In the place of a stream: a line of our own."""

# Writing of labelled pieces: where a label is due, and where a line must be ended first.


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
            if isinstance(piece.item, Text) and not piece.ranks:
                self._add(buffered, _NOTE, f"{self._ended(_NOTE)}{piece.item.text}")
                self._continuable = _push(self.shown, piece, False)
            elif isinstance(piece.item, Text):
                self._add(buffered, piece.item.name, self._labelled(piece, piece.item))
            elif piece.item.data.keys() == {"text/plain"} and piece.item.is_value:
                self._add(buffered, "stdout", self._value(piece, str(piece.item.data["text/plain"])))
            else:
                if _INVISIBLE.sub("", str(piece.item.data.get("text/html", "?"))).strip():
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
            self._publisher.note(text) if name is _NOTE else self._publisher.stream(name, text)
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


INTERVAL = 0.08
"""Seconds: together with what the session waits for more (0.1 s at most) less than the promised 0.2 s."""
RENDER_SECONDS = 1e-6
"""For each character on the page, added to `INTERVAL`: a browser renders all text of a stream again whenever
more comes.  JupyterLab 4.6 on a busy machine takes about this long; a page that falls behind loses output.
"""
LIMIT = 10 << 20
"""Characters of one cell's output that a notebook shows."""


class CellOutput:
    """An `OutputSink` that shows the output of one cell; any thread may call it.

    Parameters
    ----------
    publisher : Publisher
        Where it is shown.
    order : {"rank", "stream"}
        Whether the output is put in rank order at the end, or stays as it came.
    limit : int
        Characters; what comes after them goes to a file.
    logs : LogFolder, optional
        Where that file is, by default one of its own.
    """

    def __init__(
        self,
        publisher: Publisher,
        *,
        order: str = "rank",
        limit: int = LIMIT,
        logs: LogFolder | None = None,
    ) -> None:
        self._publisher = publisher
        self._in_rank_order = order == "rank"
        self._arranged = arrange if self._in_rank_order else in_arrival_order
        self._in_place = publisher.can_live
        self._lines = LiveLines(in_place=self._in_place)
        self._begun_lines: set[tuple[int, str]] = set()  # streams whose ordinary text ends within a line
        self._limit, self._logs = limit, logs or LogFolder()
        self._writer = BlockWriter(publisher)
        self._lock = threading.RLock()  # what came
        self._showing = threading.Lock()  # what is shown; taken before _lock, never inside it
        self._arrivals: list[Arrival] = []
        self._record: list[Arrival] = []  # what was final before, for `repeat`
        self._keeps_record = True
        self._shown = 0  # how many of them
        self._held = 0  # and how many at their end wait for the end of the cell
        self._notes: list[tuple[str, bool]] = []  # and whether output had come before
        self._notes_shown = 0
        self._updates: list[Rich] = []
        self._size = 0  # of what is kept
        self._printed = 0  # of all that came
        self._log: OverflowLog | None = None
        self._cleared = False
        self._clear_before_next: set[int] = set()
        self._finished = False
        self._final_shown = False
        self._ended = threading.Event()
        self._ticker: threading.Thread | None = None

    def stream(self, rank: int, name: str, text: str) -> None:
        """Show text that a rank printed."""
        drawn = text
        if not self._lines.has(rank, name):
            # empty lines at the end may be the way down to a bar: ``tqdm(position=2)`` flushes them
            begun = (rank, name) in self._begun_lines
            whole = text[: before_moves(text)].rstrip("\n")
            end = len(whole) + int(bool(whole) or (begun and text[:1] == "\n"))
            text, drawn = text[:end], text[end:]
            if text:
                self._arrive(rank, Text(name, text), len(text))
                (self._begun_lines.discard if text[-1] == "\n" else self._begun_lines.add)((rank, name))
            if (above := rows_above(drawn)) and self._log is None:
                drawn = self._take_back(rank, name, above) + drawn
        if drawn:
            self._begun_lines.discard((rank, name))
            self._draw(rank, name, drawn)

    def display(
        self,
        rank: int,
        data: dict[str, Any],
        metadata: dict[str, Any],
        transient: dict[str, Any],
        update: bool,
    ) -> None:
        """Show a rich display of a rank; each rank has its own ``display_id``s."""
        transient = dict(transient)
        if (identity := transient.get("display_id")) is not None:
            transient["display_id"] = f"nbparallel-rank-{rank}-{identity}"
        item = Rich(data, metadata, transient)
        if update:
            self._update(rank, item)
        elif data.keys() == {"text/plain"} and identity is None:
            self.stream(rank, "stdout", f"{data['text/plain']}\n")
        else:
            self._arrive(rank, item, _size(data))

    def result(self, rank: int, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Show the value of a rank's last expression."""
        self._arrive(rank, Rich(data, metadata, {}, is_value=True), _size(data))

    def clear(self, rank: int, wait: bool) -> None:
        """Remove what a rank has shown, for its ``clear_output``."""
        with self._lock:
            if wait:
                self._clear_before_next.add(rank)
            else:
                self._drop(rank)

    def note(self, text: str) -> None:
        """Show a line of our own: above the output if it comes before it, else below."""
        with self._lock:
            self._notes.append((encodable(text), bool(self._arrivals)))
            self._wake()

    def progress(self, text: str) -> None:
        """Show a line of our own that changes in its place; an empty text removes it."""
        if self._in_place and text:
            self._draw(NO_RANK, "stdout", f"\r{text}\x1b[K")
        elif self._in_place and self._lines.has(NO_RANK, "stdout"):
            self.clear(NO_RANK, wait=False)

    def show_now(self) -> None:
        """Show what has come: the user is about to be asked."""
        with self._showing:
            self._show_new()

    def finish(self) -> None:
        """Show what is left, in its final order; what comes later is shown as it comes.

        If an interrupt cuts this short, a second call completes it.
        """
        if self._final_shown:
            return
        with self._lock:
            self._finished = True
        self._ended.set()
        if (ticker := self._ticker) is not None:
            ticker.join()
        with self._showing, labelled_ranks():  # labels are those of lines that came while the cell ran
            self._show_final()
            self._forget()
        with self._lock:
            self._ticker = None
            if self._has_new():
                self._wake()

    def repeat(self, again: CellOutput) -> None:
        """Show in `again` what has come so far, as a cell would show it that has just ended."""
        with self._lock:
            again._arrivals = [*as_items([*self._record, *self._arrivals])]
            again._notes = list(self._notes)
        if not (again._arrivals or again._notes):
            again.note("the last cell has shown nothing; %parallel_tb shows the error of one that failed")
        again.finish()

    def drop_record(self) -> None:
        """Release what `repeat` would show: another cell has output of its own."""
        with self._lock:
            self._record, self._keeps_record = [], False

    def _arrive(self, rank: int, item: Item, size: int) -> None:
        with self._lock:
            if self._begin(rank, item, size):
                self._append(rank, item, size)

    def _draw(self, rank: int, name: str, text: str) -> None:
        """Take text of a stream that moves the cursor: its lines are kept as they are, not as they came."""
        with self._lock:
            if self._begin(rank, Text(name, text), len(text)):
                self._arrivals += self._lines.feed(rank, name, text)
                self._wake()

    def _take_back(self, rank: int, name: str, count: int) -> str:
        """Remove and return the last lines of a stream, to which its cursor goes back; however it was cut."""
        with self._lock:
            taken, index = "", len(self._arrivals)
            while index and taken.count("\n") <= count:
                index -= 1
                owner, item = self._arrivals[index]
                if owner != rank:
                    continue
                if not isinstance(item, Text) or item.name != name:
                    break
                taken = item.text + taken
                del self._arrivals[index]
                if index < self._shown:
                    self._shown, self._cleared = self._shown - 1, True
            lines = taken.splitlines(keepends=True)
            begun = bool(lines) and not lines[-1].endswith("\n")
            kept, lines = lines[: -count - begun], lines[-count - begun :]
            if kept:
                self._arrivals.insert(index, (rank, Text(name, "".join(kept))))
                self._shown += index < self._shown
            self._size -= sum(map(len, lines))
            return "".join(lines)

    def _begin(self, rank: int, item: Item, size: int) -> bool:
        """Prepare for something that a rank shows; False if it goes to the log."""
        if self._log is not None:
            if lost := self._log.write(rank, item):
                self._notes.append((lost, True))
                self._wake()
            return False
        if rank in self._clear_before_next:
            self._drop(rank)
        self._printed += size
        return True

    def _append(self, rank: int, item: Item, size: int) -> None:
        if self._size + size > self._limit and self._log is None:
            self._arrivals += self._lines.end()
            self._log = OverflowLog(self._logs, self._limit, as_items([*self._arrivals, (rank, item)]))
            self._notes.append((self._log.notice, True))
            item, size = beginning(item, self._limit - self._size), self._limit - self._size
        self._arrivals.append((rank, item))
        self._size += size
        self._wake()

    def _update(self, rank: int, new: Rich) -> None:
        with self._lock:
            self._printed += _size(new.data)
            identity = new.transient.get("display_id")
            for index, (owner, item) in enumerate(self._arrivals):
                if owner == rank and isinstance(item, Rich) and item.transient.get("display_id") == identity:
                    self._arrivals[index] = (rank, new)
            self._updates.append(new)
            self._wake()

    def _drop(self, rank: int) -> None:
        self._clear_before_next.discard(rank)
        shown = self._arrivals[: self._shown]
        self._cleared = self._cleared or any(owner == rank for owner, _ in shown)
        self._shown = sum(owner != rank for owner, _ in shown)
        self._arrivals = [(owner, item) for owner, item in self._arrivals if owner != rank]
        self._lines.drop(rank)
        items = [item for _, item in as_items(self._arrivals)]
        self._size = sum(len(item.text) if isinstance(item, Text) else _size(item.data) for item in items)

    def _wake(self) -> None:
        if self._ticker is None:
            work = self._tick_late if self._finished else self._tick
            self._ticker = threading.Thread(target=work, name="nbparallel-output", daemon=True)
            self._ticker.start()

    def _tick(self) -> None:
        while not self._ended.wait(self._pause()):
            with self._showing:
                self._show_new()

    def _tick_late(self) -> None:
        """Show what comes after the end; the thread exits when nothing comes."""
        while True:
            with self._showing:
                self._show_new()
                self._forget()
            time.sleep(self._pause())
            with self._lock:
                if not self._has_new():
                    self._ticker = None
                    return

    def _pause(self) -> float:
        """Return the seconds until new output is shown."""
        return INTERVAL + (RENDER_SECONDS * self._writer.on_page if self._publisher.renders_again else 0)

    def _has_new(self) -> bool:
        return bool(
            self._shown < len(self._arrivals)
            or self._notes_shown < len(self._notes)
            or self._updates
            or self._lines.are_due
        )

    def _forget(self) -> None:
        """Release the output that is final, but of the last cell: a session remembers many."""
        with self._lock:
            if self._keeps_record:
                self._record += as_items(self._arrivals[: self._shown])
            del self._arrivals[: self._shown]
            self._shown = 0
            self._writer.forget()
            self._final_shown = True

    def _show_new(self) -> None:
        """Show what came since the last time; the lock on arrivals is held only to read them."""
        with self._lock:
            self._settle(self._lines.settle())
            pieces = self._new_pieces()
            updates, self._updates = self._updates, []
            again = (
                self._cleared
                and self._can_show_again()
                # everything can be shown now and at the end within twice what was printed
                and self._writer.size + 2 * self._size <= 2 * self._printed + 2048
            )
            if again:
                pieces, self._cleared = self._final(self._without_live(self._arrivals), self._notes), False
            live = self._lines.next_state(again=again) if self._in_place else None
        if again:
            self._writer.show_again(pieces)
        else:
            self._writer.show(pieces)
        for new in updates:
            self._writer.update(new)
        if live is not None:
            self._writer.show_live(live)

    def _settle(self, arrivals: list[tuple[int, Text]]) -> None:
        for rank, text in arrivals:
            self._append(rank, text, len(text.text))

    def _show_final(self) -> None:
        with self._lock:
            self._settle(self._lines.end())
            if not (self._arrivals or self._notes or self._updates or self._cleared):
                return
            updates, self._updates = self._updates, []
            live = last_state(self._arrivals)
            new, final = self._new_pieces(), self._final(self._arrivals, self._notes)
            changed, self._cleared = self._cleared or bool(self._writer.live), True  # if this is interrupted
        for update in updates:
            self._writer.update(update)
        if not self._writer.shown and not self._writer.live:
            self._writer.show(final)
        elif not self._in_rank_order or not self._can_show_again():
            self._writer.show_live(live, last=True)
            self._writer.show(new)
        elif changed or self._writer.after(new) != final:
            self._writer.show_again(final)
        else:
            self._writer.show(new)
        self._cleared = False

    def _without_live(self, arrivals: list[Arrival]) -> list[Arrival]:
        """Leave out the lines that are shown while they change."""
        return [a for a in arrivals if not isinstance(a[1], Progress)] if self._in_place else arrivals

    def _final(self, arrivals: list[Arrival], notes: list[tuple[str, bool]]) -> list[Piece]:
        above = [_note(text) for text, late in notes if not late]
        below = [_note(text) for text, late in notes if late]
        return [*above, *self._arranged(arrivals), *below]

    def _new_pieces(self) -> list[Piece]:
        notes, self._notes_shown = self._notes[self._notes_shown :], len(self._notes)
        if not self._finished and self._in_rank_order and not self._can_show_again():
            self._delay_values()
        else:
            self._held = 0
        arrivals = self._arrivals[self._shown : len(self._arrivals) - self._held]
        self._shown += len(arrivals)
        return self._final(self._without_live(arrivals), notes)

    def _delay_values(self) -> None:
        """Delay the values to the end: without clearing, only this puts them into rank order."""
        new = self._arrivals[self._shown :]
        values = [arrival for arrival in new if is_value(arrival[1])]
        self._held = len(values)
        self._arrivals[self._shown :] = [*(a for a in new if not is_value(a[1])), *values]

    def _can_show_again(self) -> bool:
        return self._publisher.can_clear and self._log is None and not self._final_shown


def _note(text: str) -> Piece:
    return Piece((), Text("stdout", f"[nbparallel] {text}\n"))


def _size(data: dict[str, Any]) -> int:
    return sum(len(part) for part in data.values() if isinstance(part, (str, bytes)))
