"""Names in the file system: which may exist, which client makes each, and the owner records beside them."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass, field

from nbparallel.wire.owners import record_path


@dataclass(slots=True)
class LedgerNames:
    """The names of all clients of a session."""

    makers: dict[str, int] = field(default_factory=dict)
    """Every name that may exist -> the client that announced it."""
    records: dict[str, int] = field(default_factory=dict)
    """Every owner record that may exist -> the client whose names it covers."""
    _covered: dict[str, int] = field(default_factory=dict)
    """Record -> how many names it covers; no entry: none."""

    def add(self, path: str, client: int) -> bool:
        """Record a name (idempotent); False if it is another client's."""
        if path in self.makers:
            return self.makers[path] == client
        record = record_path(path)
        if record and self.records.setdefault(record, client) != client:
            return False
        self.makers[path] = client
        if record:
            self._covered[record] = self._covered.get(record, 0) + 1
        return True

    def drop(self, path: str) -> str:
        """Forget a name that exists no longer; return its record, empty if it has none."""
        del self.makers[path]
        record = record_path(path)
        if record:
            self._covered[record] -= 1
            if not self._covered[record]:
                del self._covered[record]
        return record

    def records_of(self, client: int) -> list[str]:
        """Return the records of one client's names."""
        return sorted(record for record, maker in self.records.items() if maker == client)

    def bare(self, records: Iterable[str], living: Container[int]) -> list[str]:
        """Forget and return those records whose maker is dead and that cover no name any more."""
        bare = [
            record
            for record in records
            if record and self.records[record] not in living and record not in self._covered
        ]
        for record in bare:
            del self.records[record]
        return bare

    def drop_unused(self, client: int, in_use: Collection[str]) -> list[str]:
        """Forget the names of a client that has ended, but for those of segments; return them, sorted."""
        dropped = sorted(
            path for path, maker in self.makers.items() if maker == client and path not in in_use
        )
        for path in dropped:
            self.drop(path)
        return dropped
