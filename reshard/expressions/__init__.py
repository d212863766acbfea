"""Tensors that are computed from others: sums, scaled blocks, products. `computed` makes a checkpoint of them."""
