"""The life of a segment, from the first array in it to the reuse of its memory.

::

    maker: Store.share ─ Allocator: MemoryPool, Region or Strategy.create
             │ SegmentTable.add: id, address, root              (OwnSegments: live)
             │ SegmentTable.register: REGISTER to the session   (SegmentRegistrar)
             ▼ ArrayHandle, in a message
    other: Store.attach ─ SegmentTable.root: MappingCache or FETCH, map   (FetchedSegments)
             │ its last array dies; reap: RELEASE, the mapping stays in MappingCache
    maker: its last array dies; reap: RELEASE                   (OwnSegments: released)
             ▼ notice IDLE: no process holds it
           OwnSegments.retire: FORGET, the Block goes to MemoryPool or back to the system
"""
