"""For eyes: lazy arrays, words, plain data for JSON, HTML and pictures.

Pure functions but for `arrays`: they open no file and print nothing. Names come from files that nobody vouches for: in
words each goes through `errors.printable`, in HTML and SVG through `svg.tag` too.
"""
