"""Command groups, and commands about the program itself."""
