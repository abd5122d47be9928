"""First contact with a GPU: readings, traces and launches in a few calls, recorded to be replayed."""
