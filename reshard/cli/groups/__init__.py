"""Commands that have commands."""
