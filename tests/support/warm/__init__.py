"""Processes that start immediately: they are forked from one that has imported torch."""
