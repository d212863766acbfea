"""Opening what is there: the way to a `Checkpoint`, and one room for each format that lists its own blocks."""
