"""``python -m autopipe.cli`` is the ``autopipe`` command, for callers that know only the path of the interpreter."""

from .main import main

main()
