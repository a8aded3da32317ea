"""``Manifest``: the JSON description of a checkpoint. Everything is kept under the model's own parameter names.

``parts`` writes it when a checkpoint is finished, and ``checkpoint.Checkpoint`` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class StageState:
    """The training state of one stage. See ``runtime.training_state``."""

    # the parameters that the stage steps
    owned: tuple[str, ...] = ()
    # its optimizer and scheduler, in typed JSON; None if the stage trains nothing
    state: Any = None
    # the same as the user's hooks built it, without tensors, so that an edited hook is detected
    initial: Any = None


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """What a file has of a tensor that lies in several files.

    Dimension ``dim`` consists of ``blocks`` equal blocks, and each block of ``count`` ranges; the file has range
    ``index`` of every block. A fused weight of queries, keys and values has 3 blocks, one for each.
    """

    dim: int
    index: int
    count: int
    blocks: int = 1
    # of a dimension that is a concatenation: the (length, blocks) of each part; then ``blocks`` is 1
    segments: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.dim < 0 or self.blocks < 1 or not 0 <= self.index < self.count:
            raise ValueError("a slice has a dimension from 0, at least one block, and an index below its count")


@dataclass(frozen=True, slots=True)
class StageFile:
    """One file of tensors. A stage has one, or one for each of the processes that write a part of it."""

    file: str
    sha256: str
    bytes: int
    # the names in the file, such as ``model.wte.weight``
    tensors: tuple[str, ...]
    # empty, except in the first file of a stage, and in that of a replica with an optimizer state of its own
    training: StageState = StageState()
    # for each tensor of which other files have the rest
    slices: dict[str, TensorSlice] = field(default_factory=dict)
    # written by earlier formats; nothing reads them
    ties: dict[str, int] = field(default_factory=dict)
    groups: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """The options that decide the training results, as the run had them when it wrote a checkpoint."""

    # "": the optimizer of the model file
    optimizer: str = ""
    # None: the default of the optimizer
    lr: float | None = None
    precision: str = "fp32"
    # 0: the data decides
    batch_size: int = 0
    num_microbatches: int = 1
    clip_grad_norm: float = 0.0
    deferred_batch_norm: bool = False
    schedule: str = ""
    ema: float = 0.0
    compile: bool = False


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of ``manifest.json``."""

    # optimizer steps done
    step: int
    # where the data continues: ``position`` minibatches of ``epoch`` were read
    epoch: int
    position: int
    seed: int
    graph_digest: str
    plan_digest: str
    files: tuple[StageFile, ...]
    # of the loss scale in float16, 0 for other precisions
    scale: float = 0.0
    good_steps: int = 0
    # digest of the ``position`` minibatches; "" in a checkpoint that was written without one
    data: str = ""
    # None in a checkpoint of an earlier format, which does not hold the complete optimizer state either
    options: TrainingOptions | None = None

    def __post_init__(self) -> None:
        if min(self.step, self.epoch, self.position, self.good_steps, self.scale) < 0:
            raise ValueError("steps, epochs, positions and the scale of the loss must not be negative")
        if len({stage.file for stage in self.files}) < len(self.files):
            raise ValueError("a file is listed twice")
