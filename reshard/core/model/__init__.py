"""Checkpoints as tensors, their blocks, and the byte ranges of each block."""
