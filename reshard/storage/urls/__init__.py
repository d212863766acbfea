"""Requests to URLs: timeouts, retries, and the special needs of S3."""
