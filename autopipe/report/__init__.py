"""Human-readable output: plans, profiles, timelines and results as tables and text. Prints nothing, reads no files."""
