"""Clients of stores at URLs, and what they share: connections, buffers, listings, retries."""
