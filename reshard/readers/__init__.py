"""Opening directories that describe themselves: one room a format that lists its own blocks."""
