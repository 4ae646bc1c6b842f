"""What goes through a pipe: an ordinary pickle, arrays as handles, what ``__main__`` defines by value.

One message of a queue::

    sender    Queue.put                  parcels.wrapped; the library's own thread pickles it
                WrappedObject.__reduce__   light_pickling.try_pickle, if it needs nothing of ours; else pack:
                  transfer.pickling        a shared array becomes a handle, a large private one is copied once
                  HouseholdMember.post     a parcel holds the segments while the message is under way
    receiver  pickle.loads               parcels.open_parcel: maps the segments
                HouseholdMember.take       this process holds them now, and the parcel ends

`main_globals` decides which globals of a travelling function the receiver takes, `call_copies` which arrays
are copied once for many messages; `exchange` finds this process's membership without loading the household.
"""
