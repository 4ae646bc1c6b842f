"""What carries a session over hosts in tests: a cluster inside of the process."""

from tests.harness.clusters.loopback import Loopback, session_messages

__all__ = ["Loopback", "session_messages"]
