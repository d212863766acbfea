"""Pages, texts and data of strategies, of the results of `reshard.compute`, and of lists of checkpoints."""
