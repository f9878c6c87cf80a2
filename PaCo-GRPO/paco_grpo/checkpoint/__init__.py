"""What a run saves and loads: checkpoints, averaged weights, adapters with their model cards."""
