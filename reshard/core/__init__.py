"""What every conversion needs, whatever the formats: planning, and comparing what was written."""
