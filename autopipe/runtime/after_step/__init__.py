"""What happens behind an optimizer step: the user's ``after_step`` hook, called for the stages of a rank."""

from autopipe.runtime.after_step.hook import AfterStep
from autopipe.runtime.after_step.loans import Loan, borrowed, loans

__all__ = ["AfterStep", "Loan", "borrowed", "loans"]
