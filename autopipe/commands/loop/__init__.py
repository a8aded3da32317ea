"""A training loop of the user's own: ``Pipeline.steps``."""
