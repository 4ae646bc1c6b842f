"""Runtime support of the operations: a rank's context, waiting, shared arrays, failures, fork guard."""
