"""Rules between the names and shapes of two programs: what fuses, splits, stacks, transposes and renames tensors."""
