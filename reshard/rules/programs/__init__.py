"""What rules need to know of single programs: how their files contradict the rules."""
