"""Batches of training calls that are cut into parts: ``autopipe run --num-microbatches``."""
