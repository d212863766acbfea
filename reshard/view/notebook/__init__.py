"""What notebooks ask of results: completions, data frames, tables to search, and `with`."""
