"""Checkpoint 2.0 of MindSpore Transformers."""
