"""Parts of a command that run in a process of their own, whose end gives back the memory of the GPU."""
