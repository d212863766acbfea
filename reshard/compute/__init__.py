"""Compute with the values of tensors: statistics, and the differences of two checkpoints."""
