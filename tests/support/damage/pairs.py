"""The pairs that the tests run: the damages of each setting in which they have an effect."""

from __future__ import annotations

_DAMAGES = {
    "fp32": """
        grad_1.0001 grad_sign grad_x2 grad_delayed grad_drop_all grad_drop_one grad_none_one grad_bf16 grad_last_mb
        grad_shifted_one lr_group decay_twice param_left_out state_reset step_skipped step_twice loss_factor_stage
        loss_detached loss_reported target_rolled mask_other_mb mask_other_step mask_other_seed mb_lost mb_twice
        mb_swapped buffers_frozen buffers_frozen_stage buffers_twice msg_bf16_threads msg_trunc_threads
        msg_gradient_threads sched_late stale_activation tie_once tie_value grad_reported counters_frozen
        buffers_missing state_not_stepped state_reset_last state_reset_stage loss_factor_shared_x2
        loss_factor_shared_even
        split_drops_sample split_doubles_sample split_targets seeds_of_microbatches seeds_of_minibatches
        seeds_of_positions eval_train_mode eval_loss_factor eval_moves_buffers
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
    "big16": "fp16_zero grad_drop_one",
    "nan": "nan_to_zero",
    "deferred": "deferred_momentum",
    "complex": "msg_conjugated_threads grad_conjugated grad_real",
    "compile": "grad_1.001 grad_one_1.00001 compiled_one compiled_all",
    "clip": "clip_off clip_one_stage clip_norm_without_one grad_1.0001 grad_last_mb",
    "ema": "ema_off ema_decay eval_other_weights grad_1.0001",
    "recompute": "buffers_twice mask_other_mb recompute_other_seed recompute_eval",
    "recompute-block": "recompute_other_seed",
    "bigtie": "tie_once_sum tie_value",
    "interleaved": "grad_1.001_rank grad_sign stale_activation tie_once",
    "zero-bubble": "grad_1.0001 grad_last_mb mb_lost weights_pass_dropped tie_once",
    "2bw": "grad_1.0001 mb_twice version_newer version_older eval_old_version",
    "2bw-complex": "version_older",
    "2bw-5": "version_older",
    "pipedream": "mb_lost version_newer",
    "pipedream-5": "version_older",
    "spilled3": "grad_1.001 grad_1.001_last_stage spill_old tie_once buffers_frozen_stage",
    "spilled3-4": "spill_opt_old",
    "replicas": """
        grad_1.001_rank grad_drop_rank_last grad_drop_rank_third rep_lost rep_lost_second rep_mean rep_one_weights
    """,
    "rep-complex": "grad_drop_rank_third",
    "replicas-bf16": "grad_1.001_rank grad_sign_rank",
    "rep-bn": "rep_buffers",
    "tp2": "grad_1.0001 tp_sum_member tp_sum_scaled tp_gradient_member",
    "tp2-seq": "tp_partial tp_sum_member",
    "tp2x2": "tp_sum_member tp_tie_member",
    "sample-gpt": "grad_1.0001 mb_lost tie_once",
    "train-first": "grad_1.001_rank grad_sign_second split_drops_sample",
    "train": "msg_bf16_process msg_gradient_process save_wrong sched_late tie_value batch_skipped batch_repeated",
    "train-big16": "msg_gradient_process",
    "train-2bw": "version_older",
    "train-eval": "eval_train_mode eval_loss_factor eval_moves_buffers",
    "train-ignore-nan": "nan_to_zero",
    "audit": """
        buffers_frozen decay_twice grad_1.0001 grad_x2 lr_group msg_bf16_process msg_trunc_process
        nonfinite_stop_scale param_left_out tie_value target_rolled mb_lost round_weight
        loss_reported state_reset batch_skipped batch_repeated batches_exchanged buffers_unreported
        loss_factor_shared_x2
    """,
    "audit-bf16": "grad_1.0001 grad_drop_all grad_drop_one grad_sign_one grad_x2 msg_bf16_process",
    "audit-fp16": "fp16_scale_stage fp16_scale_second",
    "audit-big16": "fp16_zero grad_sign_one",
    "audit-clip": "clip_one_stage",
    "audit-ema": "ema_off ema_decay",
    "audit-2bw": "version_newer version_older",
    "audit-compile": "compiled_sign",
    "audit-complex": "msg_conjugated_process",
    "audit-recompute": "recompute_other_seed recompute_eval",
    "audit-replicas": "rep_lost rep_mean grad_sign_rank sum_process",
    "audit-rep-bn": "rep_buffers",
    "saved": "save_wrong save_without save_other_state save_late save_flipped buffers_missing tie_value",
    "saved-replicas": "save_wrong save_other_state grad_sign_rank",
    "saved-tp2": "save_wrong save_other_state save_flipped",
    "saved-ema": "save_late",
    "resume": """
        restore_one restore_one_rank resume_buffers resume_buffers_rank restore_opt restore_opt_rank restore_sched
        restore_sched_rank restore_sched_start read_one read_exchanged resume_skips save_wrong
    """,
    "resume-first": "batches_exchanged resume_skips",
    "resume-ema": "restore_ema",
    "resume-2bw": "restore_versions_newest",
    "resume-fp16": "restore_scale",
    "resume-replicas": "restore_one restore_opt_rank",
    "resume-tp2": "restore_one read_one restore_opt_rank",
    "resume-spilled": "restore_one restore_opt",
    "resume-audit": "restore_one restore_one_rank restore_opt restore_sched resume_buffers loss_factor_shared_x2",
    "eval": "restore_one_rank resume_buffers_rank read_one",
    "eval-ema": "read_average",
    "run": "script_backward script_forward script_step",
}
_SOONER = {
    "fp32": """
        grad_1.0001 mb_lost counters_frozen buffers_missing loss_reported state_reset_last eval_loss_factor
        loss_factor_shared_x2 split_drops_sample seeds_of_microbatches
    """,
    "clip": "clip_one_stage",
    "two": "decay_second",
    "bf16": "grad_1.001",
    "big16": "fp16_zero",
    "replicas": "grad_drop_rank_third",
    "tp2": "tp_sum_member",
    "2bw": "version_older",
    "train-first": "grad_1.001_rank",
    "train": "msg_bf16_process",
    "audit": "state_reset batches_exchanged",
    "saved": "save_wrong",
    "resume": "restore_one_rank resume_skips",
    "run": "script_backward",
}

PAIRS = [(setting, damage) for setting, names in _DAMAGES.items() for damage in names.split()]
SOONER = [(setting, damage) for setting, names in _SOONER.items() for damage in names.split()]
EQUAL_SOONER = ("fp32", "train")
SWITCHED_SOONER = ("off_buffers", "off_states", "off_evaluation", "off_weights", "off_restored")
