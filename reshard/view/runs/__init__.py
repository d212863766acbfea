"""Views of a finished run, from the receipts of its tasks."""
