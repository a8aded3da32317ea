"""The user's Python for every microbatch, compared with the stage code while training runs.

``tape`` runs model and loss on fake tensors beside the calls that it knows (``reading``); ``keys`` says what makes two
calls the same, ``programs`` what makes two graphs the same, and ``live`` has the user's model meanwhile.
"""

from autopipe.trace.tape.tape import Difference, Known, Tape, why_unknown

__all__ = ["Difference", "Known", "Tape", "why_unknown"]
