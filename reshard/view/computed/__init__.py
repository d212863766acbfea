"""The results of `reshard.compute` as text, as plain data, and as HTML."""
