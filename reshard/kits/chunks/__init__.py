"""Encoded chunks of tensors."""
