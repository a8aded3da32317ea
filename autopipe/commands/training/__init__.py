"""``autopipe train``: one run, in as many attempts as it takes."""
