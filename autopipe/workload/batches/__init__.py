"""Batches: where they come from, their leaves, form, layout and digest."""
