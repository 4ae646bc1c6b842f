"""Dask's cluster as a `nbparallel.cluster.contract.Cluster`: the only room that imports `distributed`."""
