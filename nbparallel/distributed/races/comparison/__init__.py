"""The kernel's side: finds data races in what all ranks have recorded in a checked cell.

::

    compare(logs)                    race_search
      join_logs                      joined_logs: one log for each rank
      VectorClocks.intervals         vector_clocks: an order in which nothing comes before its cause
      Walk.visit                     walk: each access beside the last ones of other ranks
        find_overlap                 overlap, byte_sets: do both touch a byte?
      ArrayIndices.describe          array_indices: bytes as `grid[0:8]`
      fold_conflicts                 folding, sentences: one race for each pair of lines
"""

from nbparallel.distributed.races.comparison.race_report import Race, RaceReport
from nbparallel.distributed.races.comparison.race_search import compare

__all__ = ["Race", "RaceReport", "compare"]
