"""Find the line of the user's code that an error names."""
