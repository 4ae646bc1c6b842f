"""What goes through a pipe: an ordinary pickle, arrays as handles, what ``__main__`` defines by value.

One message of a queue::

    sender    Queue.put                  the library's own thread calls parcels.pickle_message:
                its fast path              what the library would write, if that needs nothing of ours; else:
                  parcels.pack, transfer   a shared array becomes a handle, a large private one is copied once
                  SupervisorConnection.post  a parcel holds the segments while the message is under way
    receiver  pickle.loads               parcels.open_parcel: maps the segments
                SupervisorConnection.take  this process holds them now, and the parcel ends

`parcels` also says which globals of a travelling function the receiver takes and which arrays are copied once
for many messages, and finds this process's membership without loading the household.
"""
