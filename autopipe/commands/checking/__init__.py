"""``autopipe check``: whether a plan is plain training, and the cause where it is not."""
