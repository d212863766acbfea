"""Lay out the files of targets, and assign blocks of tensors to them."""
