"""Quantized weights: blocks of codes with scales."""
