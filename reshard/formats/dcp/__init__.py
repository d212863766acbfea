"""Distributed checkpoints (DCP) of PyTorch, Megatron-Core and hyper-parallel."""
