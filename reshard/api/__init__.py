"""The Python API: few functions, with the arguments of the command line. The other packages implement them."""
