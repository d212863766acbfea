"""Stores of zarr."""
