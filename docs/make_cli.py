"""Writes docs/cli.md from the commands' own help, so that the two cannot differ. ``--check`` only compares."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from generated import write_or_compare

from autopipe.cli.main import COMMANDS, autopipe
from autopipe.cli.options import Command

PAGE = Path(__file__).resolve().parent / "cli.md"
HEAD = """# Commands

`make docs` writes this page from the `--help-all` of the commands; a test compares the two.

Exit codes: 0 success, 1 an error (what, where, what to try), 2 usage, 3 a rank failed, 75 stopped cleanly with a
checkpoint, 130 Ctrl-C. With `--json`, stdout has exactly one JSON document with `schema_version`, also for an error.
Options come from the command line, then `AUTOPIPE_<COMMAND>_<OPTION>` or `AUTOPIPE_<OPTION>`, then `autopipe.toml` or
`[tool.autopipe]` in `pyproject.toml` (keys at the top for every command, a table such as `[train]` for one), then the
default.
"""
TAIL = """
## TARGET and hooks

`TARGET` is `path/to/file.py[:ATTR]` or `package.module[:ATTR]`. `ATTR` is an `nn.Module`, a subclass, or a function
that returns one. The default is the first that exists of `model`, `build_model`, `get_model`, `create_model`, `Model`,
or the only `nn.Module` subclass that the file defines. Optional names in the same file:

| name | signature | default |
|---|---|---|
| `example_inputs` | `(batch_size) -> tuple or dict` | the first batch of `data` |
| `loss` | `(output, target) -> scalar`, or `(scalar, weight)` | `output.loss`, `["loss"]`, `(logits, loss)`, a scalar |
| `batch_dim` | a number, or a structure of numbers | found from `data`: [batches.md](batches.md) |
| `data` | `(batch_size)` or `() -> iterable` of `(inputs, target)` or `dict` | synthetic, from `example_inputs` |
| `optimizer` | `(named_parameters) -> Optimizer`; built once per stage | AdamW |
| `scheduler` | `(optimizer) -> LRScheduler` | none |
| `after_step` | `(named_parameters, step)`, called after each optimizer step | none |
| `evaluate_data` | as `data` | none |
| `on_step`, `on_evaluate` | `(step, metrics)`, observe a run: [metrics.md](metrics.md#hooks) | none |
| `split` | `(batch, parts) -> list of batches` | split along the samples: [batches.md](batches.md) |

`loss` may be an `nn.Module`, or a class of one, with parameters of its own (uncertainty weighting, ArcFace, a learnable
temperature). They are trained, saved and exported with the model's, under names that begin with `loss.`, or with
`loss_hook.` if the model has an attribute `loss`. The `optimizer` hook receives them, too. Omit these names to load an
export into the model alone. A function that calls such a module is refused: name the module itself. Buffers that the
loss changes, such as a center, are in checkpoints, and in exports if the loss has a parameter, too.

`after_step` does what a training loop does next to the step: momentum teachers, normalized or clamped weights. It
receives pairs of name and parameter, including frozen ones and excluding buffers, after `optimizer.step()` and
`zero_grad()` and before `scheduler.step()`. `step` counts from 0; a skipped step (`--on-nonfinite skip`, an overflow of
float16) has no call. It is called once for each stage that has a parameter which it changes, with that stage's
parameters and those of other stages that the changed ones depend on, such as a student's for its teacher; these are
sent after every step. To find them, autopipe calls the hook beforehand on copies of all parameters, at steps 0 to 32
and at round numbers up to 100000. The hook must change the same parameters in a stage as over the complete model, draw
no random numbers, use only the parameters that it receives, and keep no tensors made from parameters; otherwise the run
is refused. Store persistent state in parameters with `requires_grad=False`.

`data` is called again for each epoch, and its result is iterated from the start. Stages work on copies: if a forward
pass changes its batch in place, the memory of `data` does not change, while a plain loop would change it.

## Questions

A plan for devices that this machine does not have answers a question. It is stored in `question/` of the work
directory. `simulate` and `report plan` show the newest plan, which may be that answer; `check`, `generate`, `train` and
`--resume` never use it. `plan` says why a plan is a question:

- `--device-name`, or a datasheet in the cluster file, names a device that is not here;
- `--cluster` describes more devices than this machine has GPUs or, without GPUs, cores.

If the work directory has a plan for this machine, these do not replace it either:

- another `--cluster`, `--link`, or more `--gpu-memory` than a device here has;
- more `--gpus` than this machine has GPUs or cores, if the stored plan has no more.

To train with such options, give them to `train`.

## The cluster file

```toml
source = "datasheet"            # or "measured"
[device]
name = "V100-16GB"
memory = "16GiB"
speed = 1.0                     # relative to the device that the profile was taken on
memory_speed = 1.0              # the same for the optimizer step; default: speed
host_bandwidth = "25GB/s"       # between the device and its host, for --schedule spilled; default: 10GB/s
# datasheet = "H100-SXM"        # instead of both speeds: memory and rates of a known device
[[level]]                       # innermost first
name = "node"
count = 4
bandwidth = "10GB/s"            # between two members
latency = "5us"
[[level]]
name = "cluster"
count = 4
bandwidth = "1.25GB/s"
latency = "20us"
```

`datasheet` names a device that autopipe knows; an error lists the names. If the profile was taken on a device without a
datasheet, such as a CPU, times are an estimate: the operations and bytes of each node, counted during profiling, at 60
% of the device's peak and at its memory bandwidth. The precision is that of the profile, so use `autopipe profile
--precision bf16` to plan bf16 training. `autopipe profile TARGET --estimate` profiles a model that exceeds this
machine's memory, without allocating weights. The search takes minutes for thousands of nodes on many devices;
`--schedule` and `--microbatch-size` shorten it.

Two nodes of eight H100 with 400 Gbit/s:

```toml
[device]
datasheet = "H100-SXM"
[[level]]
name = "node"
count = 8
bandwidth = "450GB/s"
[[level]]
name = "cluster"
count = 2
bandwidth = "400Gbit/s"
latency = "10us"
```

## The schedule file

`--schedule-file` gives your own order: one line per rank, cells separated by commas. An empty cell is idle, and `#`
begins a comment. A cell is a stage, then `F` (forward), `B` (backward) or its halves `I` (for the input) and `W` (for
the weights), then a microbatch. The file describes one minibatch; the optimizer steps after it. Stages may be on any
rank:

```text
0F0, 3F0, 3B0, 0B0, 0F1, 3F1, 3B1, 0B1
1F0, 2F0, 2B0, 1B0, 1F1, 2F1, 2B1, 1B1
```

The file determines the number of ranks, stages and microbatches. It is validated first: an error names the rule and
shows the grid with the cell marked. It is stored with the plan. """


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD]
    top = autopipe.make_context("autopipe", [], resilient_parsing=True, terminal_width=100)
    for name in ("", *COMMANDS):
        command = autopipe if not name else autopipe.get_command(top, name)
        assert command is not None
        context = top if not name else click.Context(command, info_name=name, parent=top, terminal_width=100)
        text = command.complete_help(context) if isinstance(command, Command) else command.get_help(context)
        parts.append(f"\n## {f'autopipe {name}'.strip()}\n\n```text\n{text.rstrip()}\n```\n")
    parts.append(TAIL)
    return "".join(parts)


def main() -> int:
    """Write the page, or say whether it is current."""
    return write_or_compare({PAGE: page()})


if __name__ == "__main__":
    sys.exit(main())
