"""Views of what a run did, from the receipts of its tasks."""
