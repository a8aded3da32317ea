"""What happens behind an optimizer step: the user's ``after_step`` hook, and averaged weights."""

from autopipe.runtime.after_step.average import Averages
from autopipe.runtime.after_step.hook import AfterStep
from autopipe.runtime.after_step.loans import Loan, borrowed, loans

__all__ = ["AfterStep", "Averages", "Loan", "borrowed", "loans"]
