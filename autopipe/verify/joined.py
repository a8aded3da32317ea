"""The stages of a plan joined in one process: one autograd graph, one loop, no ranks and no schedule.

They distinguish which stage reads a tied parameter; the user's model has one tensor for all of them. With ``shared``,
all stages read that one tensor, and training equals that of the user's model to the last bit. Without, each stage reads
its own tensor of the same value, and its part of the gradient is summed separately, as on ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopipe.draws import exclusive
from autopipe.generate import load_constants, load_stage
from autopipe.ir import artifact
from autopipe.ir.graph import Graph
from autopipe.ir.plan import Plan
from autopipe.runtime.batches.recording import Recording
from autopipe.runtime.context import RunContext
from autopipe.runtime.job import RunDirectory
from autopipe.stage import Stage
from autopipe.verify.plain import Subject
from autopipe.workload import Workload
from autopipe.workload.batches.forms import form_of


class JoinedStages(Subject):
    """The stages as one module.

    ``run``: the directory of the stage files, including those for other shapes that ranks have generated.
    """

    def __init__(
        self,
        run: RunDirectory,
        context: RunContext,
        workload: Workload,
        device: torch.device,
        *,
        shared: bool,
    ) -> None:
        self.workload, self.context = workload, context
        self.stages: list[Stage] = []
        self._leaves: dict[str, dict[int, nn.Parameter]] = {}
        plan, constants = context.plan, load_constants(run.stages)
        model = None
        for stage in plan.stages:
            cls = load_stage(run.stages, stage.index, graph_digest=plan.graph_digest, plan_digest=plan.digest)
            if model is None or not shared:
                with exclusive():
                    model = workload.build_model().to(device)
            adopted = cls.adopt(model, constants).place(device)
            self.stages.append(adopted)
            self._register(stage.index, adopted)
        self.model = nn.ModuleList(self.stages)
        order = [name for name in context.graph.parameters if name in self._leaves]
        self.parameters = {name: next(iter(self._leaves[name].values())) for name in order}
        codes: list[type[Stage]] = [type(stage) for stage in self.stages]
        self._recordings = [(Recording.of(plan, context.graph), codes)]
        for folder in sorted(run.stages.glob("shape_*")):
            self._take_over(folder)

    def _register(self, index: int, stage: Stage) -> None:
        """Register the parameters of a stage. An exactly tied copy is replaced by the tensor of its owner."""
        owners = {tie.parameter: tie.owner for tie in self.context.plan.ties if tie.exact and index in tie.copies}
        for path, module in list(stage.named_modules(remove_duplicate=False)):
            for key, parameter in list(module._parameters.items()):
                full = f"{path}.{key}" if path else key
                name = self.context.graph.aliases.get(full, full)
                if parameter is None:
                    continue
                if name in owners:
                    setattr(module, key, self._leaves[name][owners[name]])  # an LSTM keeps a list of its weights
                    continue
                self._leaves.setdefault(name, {})[index] = parameter

    def _take_over(self, folder: Path) -> None:
        plan = artifact.load(Plan, folder / "plan.json", renew="autopipe check")
        graph = artifact.load(Graph, folder / "graph.json", renew="autopipe check")
        constants, codes = load_constants(folder), []
        for index, stage in enumerate(self.stages):
            code = load_stage(folder, index, graph_digest=plan.graph_digest, plan_digest=plan.digest)
            stage.take_over(code, constants)
            codes.append(code)
        self._recordings.append((Recording.of(plan, graph, folder.name), codes))

    def modules(self, stage: int) -> nn.Module:
        """Return the module of a stage."""
        return self.stages[stage]

    def leaves(self, name: str) -> Mapping[int, nn.Parameter]:
        """Return the tensor of each stage that reads the parameter."""
        return self._leaves[name]

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers of all stages."""
        by_name: dict[str, torch.Tensor] = {}
        for stage in self.stages:
            constants = stage.constants
            by_name.update({name: buffer for name, buffer in stage.named_buffers() if name not in constants})
        return by_name

    def loss(self, part: Any, draws: tuple[int, int, int] | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run a microbatch through all stages."""
        leaves = self.workload.leaves(part)
        form = form_of(part)
        codes = next(codes for recording, codes in self._recordings if recording.fits(leaves, form))
        values: dict[str, torch.Tensor] = dict(leaves)
        for stage, code in zip(self.stages, codes, strict=True):
            stage.seed(draws or (0, 0, 0))
            arguments = [leaves[name] for name in code.INPUTS] + [values[name] for name in code.RECEIVES]
            # what the model returns is named as in the recording of the plan
            values.update(zip((*code.SENDS, *stage.RETURNS), stage.run(code, *arguments), strict=True))
        loss, *weight = (values[name] for name in self.stages[-1].RETURNS)
        return loss, weight[0] if weight else None
