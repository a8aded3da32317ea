"""The cost of a stage in seconds and bytes, from a profile and a schedule."""
