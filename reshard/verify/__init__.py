"""One checkpoint compared with another, with its strategy, or with a manifest."""
