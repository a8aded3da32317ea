"""Functions for another process, as commands runs them."""
