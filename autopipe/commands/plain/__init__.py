"""``autopipe plain``: the plain training loop as a script that imports no autopipe."""
