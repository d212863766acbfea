"""What commands that write checkpoints have in common: what is to be written, and how it is carried out."""
