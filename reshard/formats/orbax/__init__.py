"""Checkpoints of Orbax, as JAX's programs save them: read without JAX, Orbax or TensorStore."""
