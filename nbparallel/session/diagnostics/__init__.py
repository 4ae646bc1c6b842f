"""Examinations of this machine: the doctor and the measurement of sharing strategies."""
