"""Ranks on other hosts: peers over ssh or sockets, and the checks before they start."""
