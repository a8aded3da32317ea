"""The command line. Each command parses its options, calls one function of ``commands``, and prints the result.

Installed as ``autopipe.cli``.
"""
