"""Files of ranks, which do not describe their blocks, and single files."""
