"""TARGET text to the user's module: which file, imported how, and which object in it."""
