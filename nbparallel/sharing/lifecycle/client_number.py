"""Renumbering: a process that joins a world, or has left one, becomes another client.

Segments bear the number of their maker, so they get new ids; nobody knows the old ones.
"""

from __future__ import annotations

from nbparallel.sharing.locking import locked
from nbparallel.sharing.memory.mapping import Access
from nbparallel.sharing.store import Store


@locked
def renumber(store: Store, client: int) -> None:
    """Give a store that is in no session another client number; its arrays stay what they are.

    With a number other than 0 others may write to them from then on, as to all that a rank makes: only a
    notebook's arrays are protected from its ranks.

    Raises
    ------
    ValueError
        The store is in a session, where its segments are known by their ids.
    """
    table = store._table
    if table.brokers:
        raise ValueError(
            f"this process is client {store.client} of a session, and cannot be {client} as well"
        )
    store.client = table.client = client
    table.registrar.renumber(client, table.pool.blocks)
    store.rights_changes += 1
    segments = list(table._own.values())
    table._own.clear()
    for segment in segments:
        segment.id = table.registrar.new_id()
        table._own[segment.id] = segment
        block = segment.block
        if client and not segment.writable and block is not None and block.mapping.access is Access.WRITE:
            taking = segment.region is not None and table.regions.close(segment)
            segment.writable = True
            if taking:
                table.regions.open(segment)
        if block is not None:
            table.registrar.freed(block)
            segment.receive(block, poolable=segment.poolable)
