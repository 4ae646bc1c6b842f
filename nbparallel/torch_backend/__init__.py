"""torch.distributed on our memory: the backend ``nbparallel`` for CPU tensors.

torch is optional, and imported in this room only, never before the user imports it::

    import torch                       registration   torch calls this entry point: a name, nothing is loaded
    init_process_group("nbparallel")   membership     which ranks: those of the cell, or a world that meets
                                                      through torch's store
      torch.distributed.all_reduce(t)  backend_group  the same operation of `nbparallel.distributed`
        Work                           backend_group  what torch waits for; completed by a wait

On the ranks of a session torch's rendezvous is ours (`registration`, `membership`): it needs no port.
"""
