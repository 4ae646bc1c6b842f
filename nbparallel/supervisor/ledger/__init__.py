"""The ledger of segments: which client holds which, and what happens when the last hold ends.

`SegmentServer` reads the clients' frames (`wire.segments`) and gives each message to `Ledger.step`, a pure
state machine, which returns actions: descriptors to keep, send or close, names to unlink, notices to send.
The server performs them.  `records` has the actions and two parts of the ledger's state: memories (blocks of
memory over all their uses, which clients keep mapped) and parcels (messages under way, which hold segments,
and their mailboxes).
"""
