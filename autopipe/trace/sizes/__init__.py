"""Sizes that vary from batch to batch: two recordings fitted into one graph."""
