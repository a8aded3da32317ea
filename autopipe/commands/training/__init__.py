"""``autopipe train``: one run, in one or more attempts."""
