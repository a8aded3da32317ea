"""The comparisons of the product: how each is switched off, and the pair that is not seen without it.

Switched off, a comparison gets what plain training computed in place of what the stages did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.damage.registry import Ran, add, damages

DIFFERENCES = "verify.check", "_differences"


def _from_plain(field: str) -> Callable[..., Any]:
    def replace(differences: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
        def switched_off(trained: Any, plain: Any, *others: Any) -> Any:
            ran()
            setattr(trained, field, getattr(plain, field))
            return differences(trained, plain, *others)

        return switched_off

    return replace


for FIELD in ("gradients", "buffers", "losses", "states"):
    add(f"off_{FIELD}", *DIFFERENCES, _from_plain(FIELD))


def _parameters(averaged: bool) -> Callable[..., Any]:
    def replace(differences: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
        def switched_off(trained: Any, plain: Any, *others: Any) -> Any:
            ran()
            same = {n: tensor for n, tensor in plain.parameters.items() if n.startswith("ema.") == averaged}
            trained.parameters = {**trained.parameters, **same}
            return differences(trained, plain, *others)

        return switched_off

    return replace


add("off_weights", *DIFFERENCES, _parameters(averaged=False))
add("off_averages", *DIFFERENCES, _parameters(averaged=True))


def _instead(value: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement that calls ``value`` with the same arguments."""

    def replace(original: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
        def switched_off(*arguments: Any, **options: Any) -> Any:
            ran()
            return value(*arguments, **options)

        return switched_off

    return replace


@damages(*DIFFERENCES)
def off_replicas(differences: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Forget which tensors differ between the replicas of a stage."""

    def switched_off(trained: Any, *others: Any) -> Any:
        ran()
        trained.unlike = frozenset()
        return differences(trained, *others)

    return switched_off


# the buffers that must be there; an evaluation; more steps than two; all of it before training
add("off_reported", "verify.check", "_reported", _instead(lambda *_: set()))
add("off_evaluation", "verify.check", "_evaluation", _instead(lambda *_: ()))
add("off_steps", "commands.checking.checking", "steps_to_compare", _instead(lambda *_: 2))
add("off_first", "commands.training.runs", "_first_steps", _instead(lambda *_: None))
# the script in a process of its own
add("off_script", "script.check.reference", "Reference.compare", _instead(lambda *_: None))
# the place of an audited minibatch in the data; what is in no weight
add("off_place", "verify.plain_step", "is_in_place", _instead(lambda *_: True))
add("off_postponed", "runtime.audit.writer", "AuditWriter.due", _instead(lambda own, step: own.wanted(step)))
add("off_audited_buffers", "verify.plain_step", "_buffers", _instead(lambda *_: set()))
# the minibatches that the data gave; what a rank holds after a restore; what is in the file of a checkpoint
add("off_given", "runtime.batches.source", "Source._refuse_unused", _instead(lambda *_: None))
add("off_restored", "runtime.checkpoint.proof", "RestoreProof.refuse_differences", _instead(lambda *_: None))
add("off_saved", "runtime.checkpoint.parts", "refuse_other_file", _instead(lambda *_: None))
add("off_restored_weights", "runtime.session", "refuse_other_weights", _instead(lambda *_, **__: None))
add("off_unequal_replicas", "runtime.checkpoint.parts", "refuse_unequal_replicas", _instead(lambda *_: None))
add("off_unequal_ties", "runtime.checkpoint.parts", "refuse_unequal_ties", _instead(lambda *_: None))
add("off_missing", "runtime.checkpoint.saver", "refuse_missing", _instead(lambda *_: None))
add("off_audited_state", "verify.audited_state", "RunStep.state_differences", _instead(lambda *_: iter(())))


def _of_audit(tensors: bool) -> Callable[..., Any]:
    def replace(compared: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
        def switched_off(ours: Any, loss: float, plain: Any, *others: Any, **options: Any) -> Any:
            ran()
            if tensors:
                ours.tensors = dict(plain.tensors)
            return compared(ours, loss if tensors else plain.loss, plain, *others, **options)

        return switched_off

    return replace


add("off_audited_tensors", "verify.plain_step", "_compared", _of_audit(tensors=True))
add("off_audited_loss", "verify.plain_step", "_compared", _of_audit(tensors=False))


# -- inputs that the plain loop computes by itself ---------------------------------------------------------------------


def _split_by_ranks(workload: Any, item: Any, count: int) -> Any:
    return workload.split(item, count)


@damages("verify.plain", "factors_of")
def off_factors(factors_of: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Take the factors of the damaged ranks, which are doubled."""

    def switched_off(*arguments: Any) -> Any:
        ran()
        factors, different = factors_of(*arguments)
        return [2 * factor for factor in factors], different

    return switched_off


@damages("reference.seeded_draws", "seed_of")
def off_seeds(own: Callable[..., Any], ran: Ran) -> Callable[..., Any]:
    """Take the seeds of the ranks."""

    def switched_off(*numbers: int) -> Any:
        from autopipe.draws import seed_of

        ran()
        return seed_of(*numbers)

    return switched_off


add("off_parts", "verify.plain", "parts_of", _instead(_split_by_ranks))
add("off_deferred", "verify.deferred", "OwnStatistics.commit", _instead(lambda own, commit: commit()))

COMPARISONS: dict[str, tuple[str, str]] = {
    "off_gradients": ("fp32", "grad_reported"),
    "off_weights": ("two", "decay_second"),
    "off_buffers": ("fp32", "counters_frozen"),
    "off_losses": ("fp32", "loss_reported"),
    "off_states": ("fp32", "state_reset_last"),
    "off_averages": ("ema", "ema_off"),
    "off_replicas": ("rep-complex", "grad_drop_rank_third"),
    "off_reported": ("fp32", "buffers_missing"),
    "off_evaluation": ("fp32", "eval_loss_factor"),
    "off_steps": ("2bw-complex", "version_older"),
    "off_first": ("train-first", "grad_1.001_rank"),
    "off_script": ("run", "script_backward"),
    "off_place": ("audit", "batches_exchanged"),
    "off_postponed": ("train-big16", "msg_gradient_process"),
    "off_audited_buffers": ("audit", "buffers_unreported"),
    "off_given": ("resume", "resume_skips"),
    "off_restored": ("resume", "restore_one_rank"),
    "off_saved": ("saved", "save_late"),
    "off_missing": ("saved", "save_without"),
    "off_restored_weights": ("eval", "restore_one_rank"),
    "off_unequal_replicas": ("saved-replicas", "grad_sign_rank"),
    "off_unequal_ties": ("saved", "tie_value"),
    "off_audited_state": ("audit", "state_reset"),
    "off_audited_tensors": ("audit", "round_weight"),
    "off_audited_loss": ("audit", "loss_reported"),
    "off_factors": ("fp32", "loss_factor_shared_x2"),
    "off_parts": ("fp32", "split_targets"),
    "off_seeds": ("fp32", "seeds_of_microbatches"),
    "off_deferred": ("deferred", "deferred_momentum"),
}
"""A comparison -> the setting and the damage of the pair that only it sees."""
