"""Storage: read and write byte ranges of local files and of files at URLs."""

import sys

if sys.platform == "win32":
    raise ImportError("reshard needs Linux, macOS or another POSIX system; on Windows, run it in WSL")
