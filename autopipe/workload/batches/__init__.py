"""Batches: their source, leaves, form, layout and digest."""
