"""Sharding strategies: which rank holds which block, as files and rules say it."""
