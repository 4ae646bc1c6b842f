"""The rank's side: accesses to shared arrays, and the events that order them."""
