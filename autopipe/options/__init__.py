"""The options, by name: one table for the command line, ``autopipe.Pipeline``, sweep files and stored plans."""
