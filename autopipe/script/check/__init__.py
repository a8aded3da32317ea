"""``--check``: the first steps of the script in a second process, compared with the same steps in stages."""
