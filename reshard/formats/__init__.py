"""The formats of checkpoints: a folder for each, and the list of them."""
