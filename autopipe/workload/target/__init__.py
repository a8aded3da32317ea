"""Resolve a TARGET: the user's file or module, how it is imported, and the object in it."""
