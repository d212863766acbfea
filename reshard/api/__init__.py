"""What Python users see: few names, which take what the command line takes; the shelves below have the rest."""
