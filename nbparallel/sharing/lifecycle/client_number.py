"""Client number: a process that joins a world, or has left one, becomes another client.

Segments bear the number of their maker, so they get new ids; no process knows the old ones.
"""

from __future__ import annotations

from nbparallel.sharing.lifecycle.segment_table import SegmentTable
from nbparallel.sharing.memory.mapping import Access


def renumber(table: SegmentTable, client: int) -> None:
    """Give the segments of a process that is in no session ids of another client number.

    With a number other than 0 others may write to them from then on, as to all that a rank makes: only a
    notebook's arrays are protected from its ranks.

    Raises
    ------
    ValueError
        The process is in a session, where its segments are known by their ids.
    """
    if table.brokers:
        raise ValueError(
            f"this process is client {table.client} of a session, and cannot be {client} as well"
        )
    table.client = client
    table.registrar.renumber(client, table.pool.blocks)
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
