"""Pictures: blocks in SVG and in characters, the flow of a plan, the tasks of a run, histograms."""
