"""The supervisor's process: standard library only, one thread, never unpickles."""
