"""Names: which names may exist, who said so, and which owner records lie beside them; touches nothing."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from nbparallel.wire.owners import record_path


@dataclass(slots=True)
class LedgerNames:
    """The names of all clients of a session."""

    makers: dict[str, int] = field(default_factory=dict)
    """Every name that may exist -> the client that said so."""
    records: dict[str, int] = field(default_factory=dict)
    """Every owner record that may exist -> the client whose names it speaks for."""
    _spoken_for: dict[str, int] = field(default_factory=dict)
    """Record -> how many names it speaks for; no entry: none."""

    def add(self, path: str, client: int) -> bool:
        """Take note of a name, again is fine; False if it is another client's."""
        if path in self.makers:
            return self.makers[path] == client
        record = record_path(path)
        if record and self.records.setdefault(record, client) != client:
            return False
        self.makers[path] = client
        if record:
            self._spoken_for[record] = self._spoken_for.get(record, 0) + 1
        return True

    def drop(self, path: str) -> str:
        """Forget a name that exists no longer; return its record, empty if it has none."""
        del self.makers[path]
        record = record_path(path)
        if record:
            self._spoken_for[record] -= 1
            if not self._spoken_for[record]:
                del self._spoken_for[record]
        return record

    def records_of(self, client: int) -> list[str]:
        """Return the records of one client's names."""
        return sorted(record for record, maker in self.records.items() if maker == client)

    def bare(self, records: Iterable[str], living: Container[int]) -> list[str]:
        """Forget and return those records whose maker is dead and that speak for no name any more."""
        bare = [
            record
            for record in records
            if record and self.records[record] not in living and record not in self._spoken_for
        ]
        for record in bare:
            del self.records[record]
        return bare
