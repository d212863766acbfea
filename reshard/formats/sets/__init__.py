"""Unified sets: whole tensors in files of limited size, and an index of them."""
