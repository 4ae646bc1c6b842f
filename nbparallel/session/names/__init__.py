"""The notebook's names: which ones a cell needs, and how their values reach the ranks.

One array `x` that a cell uses::

    kernel   NameDelivery.gather     free_names.find_free_names: the cell reads x
               CellInputs.gather     its value is an array (any other value: encoding.encode, pickled)
                 .encode_arrays      SharedArrays.encode ─ Store.handle: a handle, or None if it is private
               move_arrays           Store.share; x and every view of it in the notebook are bound anew
                 .encode_arrays      again: now x has a handle
             NameDelivery.deliver    when its turn has come; a cell in a queue waits before it
               _updates              for each rank: a NameUpdate, if RankVersions.needed has another version
             TaskDispatcher.launch   the updates travel in the cell's task
    rank     engine RankNames.apply  Store.attach: x, read-only unless ranks may write; then the cell runs
    kernel   TaskDispatcher.finish   the outcome has `applied`: NameDelivery.delivered
"""
