"""The life of a segment, from the first array in it to the reuse of its memory.

::

    maker: Store.share ─ room in an open Region; else Allocator: MemoryPool, or Strategy.create
             │ SegmentTable.add: id, address, root               (ExportedSegments: live)
           Store.handle ─ SegmentTable.register                  (ExportedSegments)
             │ REGISTER to the session, before the first handle
             ▼ ArrayHandle, in a message
    other: Store.attach ─ SegmentTable.root                      (ImportedSegments)
             │ the mapping is cached: HOLD; else FETCH, map
             │ its last array dies; reap: RELEASE, the mapping stays in MappingCache
    maker: its last array dies; reap: RELEASE                    (ExportedSegments: released)
             ▼ notice IDLE: no process holds it; or DROP: only a process that died held it
           SegmentTable._handle_notice ─ after IDLE: FORGET
             ▼
           ExportedSegments.retire: the Block goes to MemoryPool; after DROP back to the system
"""
