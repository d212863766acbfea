"""Megatron-LM's older checkpoints: a file for each tensor-parallel part of each pipeline stage."""
