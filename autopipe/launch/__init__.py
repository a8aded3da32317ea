"""Starts the ranks, watches them, and ends all of them when one fails."""
