"""Views of checkpoints, strategies, plans and results: text, plain data for JSON, HTML, pictures and lazy arrays.

Except in `arrays`, `progress` and `tables.objects_of`, the functions open no files and print nothing. Names come from
untrusted files: text passes each through `errors.printable`, HTML and SVG through `svg.tag`.
"""
