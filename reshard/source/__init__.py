"""From files to a `Checkpoint`: which there are, what their headers say, and which blocks they hold."""
