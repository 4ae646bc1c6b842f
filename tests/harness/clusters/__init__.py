"""What carries a session over hosts: a suite that checks it, and a cluster inside of the process."""

from tests.harness.clusters.conformance import ECHO, ClusterTests, session_messages
from tests.harness.clusters.loopback import Loopback

__all__ = ["ECHO", "ClusterTests", "Loopback", "session_messages"]
