"""What a session is doing and did: statistics, segments, names, timelines."""
