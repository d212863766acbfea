"""Turn files into a `Checkpoint`: read headers, and assemble blocks."""
