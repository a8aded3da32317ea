"""Processes that start immediately: they are forked from one that has imported torch."""

DATA_LIBRARY = "sklearn.datasets"
"""What several sample models read their data from; its import takes a second."""
