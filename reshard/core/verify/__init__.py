"""Compare a checkpoint with another one, its strategy, or a manifest."""
