"""Turn files into a `Checkpoint`: find them, read their headers, and assemble their blocks."""
