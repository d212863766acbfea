"""Views of how tensors are cut: thumbnails in tables and trees, strategies, fused tensors, pictures in characters."""
