"""Analyse the loss: its divisor, and whether the samples of a batch depend on one another."""
