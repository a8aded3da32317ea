"""Installed packages that keep state, as texts: ``cases`` are the tables, and write the files of one case."""
