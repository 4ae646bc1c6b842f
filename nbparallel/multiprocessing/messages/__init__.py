"""What goes through a pipe: an ordinary pickle, arrays as handles, what ``__main__`` defines by value.

`light_pickling` does what needs nothing of ours as soon as Python does; `parcels` the rest; `main_globals`
decides which globals of a travelling function the receiver takes, `call_copies` which arrays are copied once
for many messages.
"""
