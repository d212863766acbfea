"""Storage: read and write byte ranges of local files and of files at URLs."""
