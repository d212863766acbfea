"""What is stored beside files, as JSON: provenance, the log of a run, and their schema."""
