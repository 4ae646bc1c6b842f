"""Hosts of a cluster that the user has started, a node on each, and the contract that carries plain bytes."""
