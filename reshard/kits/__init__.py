"""What several formats share: files and pickles of tensors, encoded chunks, parts of tensor-parallel ranks."""
