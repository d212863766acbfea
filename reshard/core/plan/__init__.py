"""Plan all byte transfers before anything is read or written; pure integers."""
