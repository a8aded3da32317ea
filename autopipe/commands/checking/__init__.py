"""``autopipe check``: compare a plan with plain training, and find the cause of a difference."""
