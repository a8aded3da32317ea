"""Where the source of a function writes and reads state, and where a value that it reads goes."""
