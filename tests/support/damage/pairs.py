"""The pairs that the tests run: the damages of each setting in which they have an effect."""

from __future__ import annotations

_DAMAGES = {
    "fp32": """
        grad_1.0001 grad_sign grad_x2 grad_delayed grad_drop_all grad_drop_one grad_none_one grad_bf16 grad_last_mb
        grad_shifted_one lr_group decay_twice param_left_out state_reset step_skipped step_twice loss_factor_stage
        loss_detached loss_reported target_rolled mask_other_mb mask_other_step mask_other_seed mb_lost mb_twice
        mb_swapped buffers_frozen buffers_frozen_stage buffers_twice msg_bf16_threads msg_trunc_threads
        msg_gradient_threads sched_late stale_activation tie_once tie_value
    """,
    "fp32-6": "grad_sign_late state_not_stepped",
    "two": "decay_second",
    "signs": "grad_x2",
    "eager": "grad_sign mb_swapped",
    "bf16": """
        grad_1.001 grad_1.005 grad_1.02 grad_1.1 grad_one_1.00001 grad_one_1.01 grad_bf16 grad_last_mb grad_sign_one
        msg_bf16_threads no_autocast_last no_autocast_stage round_weight tie_once
    """,
    "fp16": "grad_1.0001 grad_sign fp16_scale_stage fp16_scale_second fp16_scale_mb fp16_zero",
    "nan": "nan_to_zero",
    "compile": "grad_1.001 grad_one_1.00001 compiled_all",
    "clip": "clip_off clip_one_stage clip_norm_without_one grad_1.0001 grad_last_mb",
    "ema": "ema_off ema_decay grad_1.0001",
    "recompute": "buffers_twice mask_other_mb recompute_other_seed recompute_eval",
    "recompute-block": "recompute_other_seed",
    "bigtie": "tie_once_sum tie_value",
    "interleaved": "grad_1.001_rank grad_sign stale_activation tie_once",
    "zero-bubble": "grad_1.0001 grad_last_mb mb_lost weights_pass_dropped tie_once",
    "2bw": "grad_1.0001 mb_twice version_newer",
    "2bw-5": "version_older",
    "pipedream": "mb_lost version_newer",
    "pipedream-5": "version_older",
    "spilled3": "grad_1.001 spill_old tie_once buffers_frozen_stage",
    "spilled3-4": "spill_opt_old",
    "replicas": "rep_lost rep_mean rep_one_weights",
    "replicas-bf16": "grad_1.001_rank grad_sign_rank",
    "rep-bn": "rep_buffers",
    "tp2": "grad_1.0001 tp_sum_member tp_sum_scaled tp_gradient_member",
    "tp2-seq": "tp_partial tp_sum_member",
    "tp2x2": "tp_sum_member tp_tie_member",
    "sample-gpt": "grad_1.0001 mb_lost tie_once",
    "train": "grad_1.001_rank",
    "audit": """
        buffers_frozen decay_twice grad_1.0001 grad_x2 lr_group msg_bf16_process msg_trunc_process
        nonfinite_stop_scale
    """,
    "audit-bf16": "grad_1.0001 grad_drop_all grad_drop_one grad_sign_one grad_x2 msg_bf16_process",
    "audit-fp16": "fp16_scale_stage",
    "audit-big16": "fp16_zero grad_sign_one",
    "audit-clip": "clip_one_stage",
    "audit-2bw": "version_newer",
    "audit-replicas": "rep_lost rep_mean",
    "resume-audit": "restore_one restore_opt restore_sched resume_buffers",
    "run": "script_backward script_forward script_step",
}
_SOONER = {
    "fp32": "grad_1.0001 buffers_frozen loss_reported mb_lost tie_once state_reset msg_bf16_threads",
    "two": "decay_second",
    "clip": "clip_one_stage",
    "signs": "grad_x2",
    "bf16": "grad_1.001 no_autocast_last",
    "replicas": "rep_lost",
    "tp2": "tp_sum_member",
    "2bw": "version_newer",
    "train": "grad_1.001_rank",
    "audit": "grad_x2 msg_bf16_process",
    "resume-audit": "restore_opt",
    "run": "script_backward",
}

PAIRS = [(setting, damage) for setting, names in _DAMAGES.items() for damage in names.split()]
SOONER = [(setting, damage) for setting, names in _SOONER.items() for damage in names.split()]
EQUAL_SOONER = ("fp32", "audit")
SWITCHED_SOONER = ("off_buffers", "off_losses")
