"""The ledger: which client holds which segment, and what the supervisor does about it."""
