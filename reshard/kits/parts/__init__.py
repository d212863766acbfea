"""How tensor-parallel parts make whole tensors."""
