"""Figures of nbparallel beside those of its peers: ``make bench`` runs all and writes docs/benchmarks.md."""
