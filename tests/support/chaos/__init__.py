"""Random single faults in complete runs, and a verdict on each run: ``make chaos``."""
