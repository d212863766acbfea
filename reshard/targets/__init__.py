"""Which files a target has, and which blocks of which tensors go into each."""
