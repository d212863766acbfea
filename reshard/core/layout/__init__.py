"""The algebra of blocks: layouts, grids and replicas; integers alone."""
