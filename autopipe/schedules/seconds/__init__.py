"""Seconds of a schedule without a timeline: repeated simulations, and a lower bound without any."""
