"""What every operation stands on: a rank's context, waiting, shared arrays, failures, fork guard."""
