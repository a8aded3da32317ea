"""Ranks on other hosts: agents over ssh, peers over sockets, and the checks before they start."""
