"""Where bytes are: local files and URLs, read and written in ranges."""
