"""Transports: how a tensor gets from one rank to another."""
