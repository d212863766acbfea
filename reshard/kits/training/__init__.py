"""The arguments of a training with Megatron-LM, which several formats state."""
