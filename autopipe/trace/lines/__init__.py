"""Which line of the user's code an error names."""
