"""The results of `reshard.compute`, and lists of checkpoints, as text, as plain data, and as HTML."""
