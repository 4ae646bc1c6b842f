"""A notebook and one rank in this process: two stores, two sets of known classes, no sockets."""

import os
from contextlib import contextmanager

from cloudpickle import cloudpickle

from nbparallel.engine.namespace import RankNames
from nbparallel.errors import ReadOnlyArrayError
from nbparallel.session.names.delivery import NameDelivery
from nbparallel.sharing import Store
from nbparallel.transfer import definitions
from nbparallel.wire.segments import AllowWrite, Register


class DirectBroker:
    """A broker that hands out descriptors of this very process."""

    def __init__(self, client, segments):
        self.client = client
        self.segments = segments

    def send(self, message, fd=None):
        """Keep a descriptor, let others write; the rest is nobody's business here."""
        if isinstance(message, Register):
            self.segments[message.segment] = [os.dup(fd), message.writable]
        elif isinstance(message, AllowWrite):
            self.segments[message.segment][1] = True

    def fetch(self, segment, *, writable, memory=0):
        """Open the segment once more, with the right that was asked for."""
        fd, allowed = self.segments[segment]
        if writable and not allowed:
            raise ReadOnlyArrayError("its creator does not allow it")
        mode = os.O_RDWR if writable else os.O_RDONLY
        return os.open(f"/proc/self/fd/{fd}", mode | os.O_CLOEXEC)

    def notices(self):
        """Return no notice."""
        return ()


class Pair:
    """Runs cells on one rank with what a notebook gives it.

    Attributes
    ----------
    notebook, rank : dict
        Their namespaces.
    preparation : Preparation
        Of the last cell.
    notes : tuple of str
        What notebook and rank said about the last cell.
    """

    def __init__(self):
        segments = {}
        self.segments = segments
        self.kernel_store, self.rank_store = Store(0), Store(1)
        self.brokers = DirectBroker(0, segments), DirectBroker(1, segments)
        self.kernel_store.connect(self.brokers[0])
        self.rank_store.connect(self.brokers[1])
        self.names = NameDelivery(self.kernel_store, self.brokers[0])
        self.notebook = {"__name__": "__main__"}
        self.rank = {"__name__": "__main__", "rank": 3, "rng": "the rank's", "world_size": 4}
        self.classes = ({}, [])
        self.rank_names = RankNames(self.rank, self.rank_store, self.brokers[1])
        self.preparation = None
        self.notes = ()

    @contextmanager
    def on_rank(self):
        """Make this process know the classes of the rank instead of the notebook's."""
        by_id, known = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID, definitions.KNOWN
        before = dict(by_id), list(known)
        self._know(*self.classes)
        try:
            yield
        finally:
            self.classes = dict(by_id), list(known)
            self._know(*before)

    @staticmethod
    def _know(by_id, known):
        cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.clear()
        cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.update(by_id)
        definitions.KNOWN.clear()
        for cls in known:
            definitions.KNOWN.add(cls)

    def type(self, source):
        """Run code in the notebook."""
        exec(source, self.notebook)

    def prepare(self, cell, share=()):
        """Prepare a cell; return its updates."""
        self.preparation = self.prepare_for([0], cell, share)
        return self.preparation.updates[0]

    def prepare_for(self, ranks, cell, share=()):
        """Prepare a cell for some ranks; return the preparation."""
        return self.names.deliver(self.names.gather(cell, self.notebook, share), ranks)

    def run(self, cell, share=()):
        """Run a cell on the rank; return the value of its last line if that is an expression."""
        updates = self.prepare(cell, share)
        with self.on_rank():
            self.notes = self.preparation.notes + self.rank_names.apply(updates)
            self.names.delivered(0, self.preparation)
            *lines, last = cell.split("\n")
            exec("\n".join(lines), self.rank)
            try:
                code = compile(last, "<cell>", "eval")
            except SyntaxError:
                exec(last, self.rank)
                return None
            return eval(code, self.rank)

    def sent(self):
        """Return the names that travelled for the last cell."""
        return [update.name for update in self.preparation.updates[0]]

    def close(self):
        """Let go of everything."""
        self.notebook.clear()
        self.rank.clear()
        self.rank_names.release_unbound()
        self.preparation = self.names = self.rank_names = None
        self.kernel_store.close()
        self.rank_store.close()
        for fd, _ in self.segments.values():
            os.close(fd)
