"""The options, by name: what the command line, ``autopipe.Pipeline``, sweep files and stored plans say about each."""

from __future__ import annotations

import dataclasses
from dataclasses import KW_ONLY, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Option:
    """One option. Its type, and the commands that have it, are in ``autopipe.options.commands``."""

    help: str
    _: KW_ONLY
    kind: str = ""  # a key of ``commands.option_values.KINDS``; "": the type decides
    common: bool = False  # ``--help`` shows it
    metavar: str = ""  # "": that of the kind
    default: Any = None  # on the command line; None: not given
    choices: tuple[str, ...] = ()
    least: int = 1  # of a count
    most: int = 2**31 - 1  # of a count
    above_zero: bool = False  # a number may not be 0
    below: float | None = None  # what a number must stay below
    flags: tuple[str, ...] = ()  # on the command line; (): ``--`` and the name
    negatable: bool = False  # a switch that has ``--no-``, too
    exists: bool = False  # a file that must exist
    required: bool = False
    excludes: tuple[str, ...] = ()  # options that cannot be given together with it
    group: str = ""  # the heading of the help below which it is shown


def _group(heading: str, **options: Option) -> dict[str, Option]:
    return {name: dataclasses.replace(option, group=heading) for name, option in options.items()}


def flag_of(name: str) -> str:
    """Return an option as it is written on the command line: ``--batch-size``."""
    return f"--{name.replace('_', '-')}"


OPTIONS: dict[str, Option] = {
    **_group(
        "Ranks and minibatches",
        gpus=Option("Number of ranks; on a CPU, processes.", common=True, most=2**17),
        batch_size=Option("Samples per optimizer step.", common=True, metavar="B"),
        num_microbatches=Option("Microbatches per minibatch.", metavar="M", excludes=("microbatch_size",)),
        microbatch_size=Option("Samples per microbatch.", metavar="b"),
        sweep_gpus=Option(
            "Predict step time and cost for each number; writes no plan.json.",
            kind="sizes",
            common=True,
            excludes=("gpus",),
        ),
        devices=Option(
            "GPUs by index, or a number of devices; on a CPU, of processes. [default: as in FILE, else all]",
            metavar="0,1|N",
        ),
        jobs_per_device=Option(
            "Jobs that may share a device if their stages take turns on it (--schedule spilled): one computes "
            "while the others copy. auto: as many as the simulation says. [default: as in FILE, else 1]",
            metavar="auto|K",
        ),
    ),
    **_group(
        "Training",
        steps=Option("Optimizer steps.", common=True, metavar="K", excludes=("epochs",)),
        epochs=Option("Passes over the data. [default: 1]", common=True, metavar="E"),
        clip_grad_norm=Option("Largest gradient norm. [default: no clipping]", metavar="X"),
        eval_every=Option("Steps between evaluations; 0: never. [default: 0]", metavar="K", least=0),
        compile=Option(
            "Compile every stage with torch.compile. Results then equal plain training within rounding, not bit "
            "for bit; not with zero-bubble. [default: no, or as in the resumed run]",
            negatable=True,
        ),
        deferred_batch_norm=Option("Update BatchNorm's running statistics once per minibatch."),
        on_nonfinite=Option(
            "Reaction to a NaN or infinite loss or gradient; skip: all ranks skip the step.",
            default="stop",
            choices=("stop", "warn", "skip"),
        ),
    ),
    **_group(
        "Model and data",
        arg=Option("Argument of the model, name=value. Repeatable.", kind="arguments", metavar="NAME=VALUE"),
        input=Option('Synthetic input, e.g. "x:i64[8,128]<1000". Repeatable.', kind="inputs"),
        loss=Option("(output, target) -> scalar, e.g. torch.nn:CrossEntropyLoss."),
        data=Option("Training data that replaces the file's `data`.", common=True),
        eval_data=Option("Held-out data that replaces the file's `evaluate_data`."),
        optimizer=Option(
            "Name, e.g. adamw, or a function of the named parameters.", common=True, metavar="NAME|TARGET"
        ),
        after_step=Option("(named_parameters, step), called after each optimizer step."),
        lr=Option("Learning rate. [default: the optimizer's own; 1e-3 for AdamW]", common=True, metavar="RATE"),
        precision=Option(
            "Precision of forward and loss: bf16 and fp16 run under autocast, fp16 with loss scaling. [default: fp32]",
            common=True,
            choices=("fp32", "bf16", "fp16"),
        ),
        seed=Option("Seed of the initial weights and of every random operation. [default: 0]", kind="seed"),
        ema=Option(
            "Keep averaged weights in float32: after each step average.lerp_(weight, 1 - DECAY), as torch's "
            "AveragedModel does. Buffers are not averaged. 0: no averages. [default: 0, or as in the resumed run]",
            metavar="DECAY",
            below=1,
        ),
        init_from=Option(
            "Initial weights: .safetensors, a state_dict (.pt), a Hugging Face folder, or a checkpoint. Each rank "
            "reads its own part. Ignored with --resume.",
            exists=True,
        ),
        trust=Option("Read --init-from even if its format can run code (torch DCP)."),
        data_reader=Option(
            "What reads the data: one rank (0) for all; a process beside it, which also compares what the model's "
            "Python does for each microbatch with the stage code; or each rank all of it.",
            default="beside",
            choices=("one", "beside", "each"),
        ),
        allow_other_data=Option("Let --resume continue although the data has changed."),
        averaged=Option("Write the averaged weights of `train --ema`.", flags=("--ema",)),
        target=Option("The model; required if others can write the run."),
    ),
    **_group(
        "Schedule",
        vertical_sync=Option(
            "pipedream: all stages use one version of the weights for a minibatch. [default: no]", negatable=True
        ),
        stages_per_rank=Option("interleaved, zero-bubble: number of stages on each rank.", metavar="V"),
        warmup_depth=Option(
            "eager-1f1b, pipedream, 2bw: microbatches in flight, as a multiple of 1f1b's. More hide slow links. "
            "[default: eager-1f1b 2, pipedream 1, 2bw the fastest of 1 to 3]",
            metavar="D",
        ),
        schedule_file=Option(
            "Your own schedule: one line for each rank, with cells such as 1F0 (stage; F, B, I or W; microbatch) "
            "separated by commas.",
            kind="file",
            exists=True,
        ),
        schedule=Option("Pipeline schedule. [default: auto]", kind="schedule", common=True, metavar="auto|NAME"),
    ),
    **_group(
        "Plan",
        replicas=Option(
            "auto: the fastest plan; a stage may run on several ranks, each with a share of the microbatches. "
            "Gradients are then summed per replica first, an order that check proves bit for bit, and BatchNorm's "
            "running statistics are averaged. never: one rank per stage, equal bit for bit to the training of one "
            "process. [default: auto; never if statistics would be averaged, and under --launcher env and slurm]",
            choices=("auto", "never"),
        ),
        recompute=Option(
            "Recompute forwards to save memory. never: keep all activations. block: recompute each stage in parts,"
            " one at a time. stage: each stage as a whole. auto: for each stage, the fastest of these that fits; "
            "your own checkpoint() calls remain recomputed. always: block, or stage where that does not fit. "
            "[default: auto]",
            choices=("auto", "never", "block", "stage", "always"),
        ),
        exact_ties=Option(
            "always: send the gradient of a tied parameter with every microbatch, which keeps one process's order "
            "of sums at any size. auto: only if it is small; otherwise the stages' sums are added once per step. "
            "[default: auto]",
            choices=("auto", "always"),
        ),
        shard_optimizer=Option(
            "auto: the replicas of a stage divide its optimizer state, where the plan would otherwise not fit or "
            "be slower; each steps a part of the parameters and sends the new values to the others. Results are "
            "the same bit for bit. never: every replica has the complete state. [default: auto]",
            choices=("auto", "never"),
        ),
        explain=Option("Print the reason for each cut, the bottleneck, and the second best plan.", common=True),
    ),
    **_group(
        "Devices and links",
        cluster=Option(
            "File that describes devices and links.",
            kind="file",
            exists=True,
            excludes=("gpu_memory", "link", "device_name"),
        ),
        gpu_memory=Option("Memory per device, e.g. 24GiB.", kind="bytes"),
        link=Option("Bandwidth between devices, e.g. 25Gbit/s.", kind="bandwidth"),
        device_name=Option(
            "Estimate the plan for this device, e.g. H100-SXM, from its datasheet. If the profile's device has a "
            "datasheet too, its times are scaled; otherwise, as on a CPU, they are computed from operations and "
            "bytes.",
            metavar="NAME",
        ),
    ),
    **_group(
        "Capture and measurement",
        device=Option("Device of the ranks. [default: auto]", choices=("auto", "cpu", "cuda")),
        microbatch_sizes=Option(
            "Microbatch sizes to measure. [default: 1,2,4,8, and up to a quarter of a large minibatch]", kind="sizes"
        ),
        threads_per_rank=Option("Threads of each rank on a CPU. [default: 1]"),
        allow_data_dependent=Option(
            "Accept branches that depend on the data, and always use the one that the first batch took."
        ),
        opaque=Option(
            "Modules that run as the user's own code and are not cut. auto: those that cannot be captured as one "
            "graph. MODULE: also these paths, separated by commas. [default: auto]",
            metavar="auto|never|MODULE",
        ),
        tensor_parallel=Option(
            "Shard the products, embeddings and attention heads of every stage over teams of N ranks, on one host."
            " Results equal plain training within rounding, not bit for bit. auto: as many as make training "
            "fastest. [default: 1, or as in the stored profile]",
            kind="team",
        ),
        sequence_parallel=Option(
            "With --tensor-parallel: between the sharded products, each rank of a team has its own positions of "
            "the sequence, and 1/N of their memory. [default: no, or as in the stored profile]",
            negatable=True,
        ),
        no_verify=Option("Do not compare the captured model with the original."),
        links=Option("Also measure between two ranks -> links.json, which plan then uses.", common=True),
        estimate=Option(
            "Count operations and bytes for plan --device-name, without timing and without memory for the weights."
            " Works for models that exceed this machine's memory.",
            common=True,
        ),
        max_shapes=Option(
            "Further shapes of the batch, such as image sizes, for which stage code is generated while training "
            "before a warning.",
            default=16,
            least=0,
        ),
    ),
    **_group(
        "Comparison with plain training",
        audit_every=Option(
            "Every K steps, from a random one on, compare one step with plain training from the run's own state, "
            "in another process. The exit code is 1 if it differs, or if all are skipped. auto: so often that it "
            "takes at most 0.5 % of the time, and, with --check, the second step; 0: never.",
            kind="audits",
            default="auto",
        ),
        check=Option(
            "Compare the first steps of a new plan with plain training, and probe its optimizer.",
            default=True,
            negatable=True,
        ),
        full_batch=Option("Also compare every parameter with one step of the full batch.", common=True),
    ),
    **_group(
        "Checkpoints and failures",
        watchdog=Option(
            "Time without progress after which a run counts as hanging. [default: 20 predicted steps, at least 60]",
            metavar="SECONDS",
            above_zero=True,
        ),
        checkpoint_every=Option(
            "Steps between checkpoints; 0: at the end only. [default: about 10 minutes by the plan's prediction]",
            metavar="K",
            least=0,
        ),
        keep_checkpoints=Option("Number to keep; 0: all.", default=3, least=0),
        resume=Option(
            "Resume from a checkpoint; without STEP, the newest. Options that are not given keep the values of the"
            " run.",
            kind="resume",
            common=True,
        ),
        max_restarts=Option(
            "If a rank fails, resume from the last checkpoint, up to N times. [default: 0; 3 with --elastic]", least=0
        ),
        elastic=Option("After a failure, continue on the remaining ranks with a new plan."),
        step=Option("Step of the checkpoint. [default: the newest]", least=0),
        verify=Option("Read every file of every checkpoint, and compare its SHA-256."),
        timeout=Option("Silence that ends a run.", common=True, metavar="SECONDS", default=1800.0),
    ),
    **_group(
        "Records",
        trace=Option("Also write the timeline as JSON for ui.perfetto.dev and chrome://tracing.", kind="file"),
        timeline=Option("Record the timeline of every rank."),
        measure_memory=Option("Measure the peak memory of each stage; slows the ranks down."),
        on_step=Option("(step, metrics), called by this process for each step; 'stop' ends the run.", kind="observer"),
        on_evaluate=Option("(step, metrics), called for each evaluation, in the same way.", kind="observer"),
        log=Option("Also record the metrics with this tool, which must be installed. Repeatable.", kind="loggers"),
        events=Option(
            "Also add every event to FILE, one line of JSON each; -: to standard error, instead of the progress there.",
            kind="file",
            metavar="FILE|-",
        ),
    ),
    **_group(
        "Launchers and hosts",
        hosts=Option(
            "Hosts to reach by ssh, and the number of ranks on each; implies --launcher ssh.",
            kind="hosts",
            excludes=("hostfile",),
        ),
        hostfile=Option("A file that lists the hosts, in lines such as `h1 slots=2`.", kind="hostfile"),
        ssh_config=Option("ssh configuration file to use instead of ~/.ssh/config.", kind="file", exists=True),
        remote_python=Option(
            "Path on the hosts of a Python with autopipe installed. [default: the path of this interpreter]",
            metavar="PATH",
        ),
        interface=Option("Network interface between the ranks. [default: from the route]", metavar="NAME"),
        trust_network=Option(
            "Allow a public internet address as the ranks' rendezvous. Their messages are not encrypted or "
            "authenticated.",
            flags=("--i-trust-this-network",),
        ),
        launcher=Option("How the ranks are started. [default: local]", kind="launcher"),
        slurm_option=Option(
            "Option of sbatch, e.g. partition=gpu or nodes=2. Repeatable; implies --launcher slurm.", kind="slurm"
        ),
        dry_run=Option("Print the commands for each host without running them."),
    ),
    **_group(
        "Output",
        work_dir=Option("Directory of the artifacts.", kind="directory", default=".autopipe"),
        run_dir=Option("Directory of the run.", kind="directory"),
        output=Option("The script to write.", common=True, default="loop.py", flags=("-o", "--output")),
        format=Option(
            "hf: a folder of safetensors files with an index, as Hugging Face uses. [default: by the name]",
            choices=("safetensors", "pt", "hf", "dcp"),
        ),
        sweep_dir=Option("Directory of the sweep. [default: .autopipe/sweeps/NAME]", kind="directory", metavar="DIR"),
        stages_dir=Option("Keep the stage files in this directory.", kind="directory", common=True),
    ),
}
