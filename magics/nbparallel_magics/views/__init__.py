"""What the magics show: status, segments, names, sharing, timeline, panel."""
