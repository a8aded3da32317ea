"""Training scripts as users write them, for ``autopipe run``: they import nothing of autopipe."""
