"""Seconds of a schedule without a timeline, a lower bound of them, and those of ranks that share cores."""
