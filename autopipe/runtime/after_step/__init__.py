"""After an optimizer step: the user's ``after_step`` hook, and averaged weights."""

from autopipe.ir.messages import Loan, borrowed, loans
from autopipe.runtime.after_step.average import Averages
from autopipe.runtime.after_step.hook import AfterStep

__all__ = ["AfterStep", "Averages", "Loan", "borrowed", "loans"]
