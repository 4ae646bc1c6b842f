"""The barrier with a payload: slots in shared memory, their protocol, comparison and deadlock detection."""
