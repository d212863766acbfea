"""Open checkpoints: `open`, and a module for each format that describes its own blocks."""
