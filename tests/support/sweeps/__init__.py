"""Sweeps for tests."""
