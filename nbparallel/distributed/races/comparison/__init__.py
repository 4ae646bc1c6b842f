"""The kernel's side: finds data races in what all ranks have recorded in a checked cell.

::

    compare(logs)                    race_search
      JoinedLogs                     joined_logs: one log for each rank
      Walk.run                       walk: each access beside the last ones of other ranks
        VectorClocks.intervals       vector_clocks: an order in which nothing comes before its cause
        find_overlap                 overlap, byte_sets: do both touch a byte?
      fold_conflicts                 folding, sentences: one race for each pair of lines
        ArrayNames.place_of          array_names, array_indices: bytes as `grid[0:8]`
"""

from nbparallel.distributed.races.comparison.race_report import Race, RaceReport
from nbparallel.distributed.races.comparison.race_search import compare

__all__ = ["Race", "RaceReport", "compare"]
