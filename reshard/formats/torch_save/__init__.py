"""Files that `torch.save` wrote, and checkpoints of them: state dicts, whole or of one rank each."""
