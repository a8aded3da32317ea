"""``python -m autopipe.cli``: the same command, where only the interpreter's path is known."""

from .main import main

main()
