"""Which bytes go where, known before anything is read or written; pure integers."""
