"""Pickles, archives and tensors of `torch.save`: read as data, and written."""
