"""``Shipping``: what each rank gets of the model: tensors, modules, stage files, and which tensors are its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from autopipe.ir.plan import Plan
from autopipe.script.calls.cutting import Program
from autopipe.script.devices import CPU
from autopipe.script.rank_locations import files_of
from autopipe.script.rank_order import RankOrder
from autopipe.script.ranks import Ranks


class Shipping:
    """The tensors and modules of one model on its ranks."""

    def __init__(self, model: nn.Module, tensors: dict[str, Tensor], ranks: Ranks, plan: Plan, compiles: bool) -> None:
        """``tensors``: parameters and buffers by first name. ``compiles``: whether ranks compile their stages."""
        self.model, self.tensors, self.ranks, self.compiles = model, tensors, ranks, compiles
        self.order: RankOrder = ranks.order
        self.sent: list[set[str]] = [set() for _ in range(self.order.num_ranks)]  # tensors that each rank has
        self._modules: list[set[str]] = [set() for _ in range(self.order.num_ranks)]
        # of the parameters of the largest stage
        self.bytes_of_stage = max(sum(tensors[name].nbytes for name in stage.parameters) for stage in plan.stages)
        self._owners = self._divided(plan)  # tensor -> the rank that has its newest value
        self.inputs: dict[int, list[tuple[str, ...]]] = {}  # program -> by stage, the inputs of the model that it reads

    def _divided(self, plan: Plan) -> dict[str, int]:
        """Return the ranks that step the parameters: for each one of its first stage, with equal bytes in replicas."""
        owners: dict[str, int] = {}
        for stage in plan.stages:
            loads = dict.fromkeys(range(self.order.num_replicas), 0)
            new = [name for name in stage.parameters if name not in owners]
            for name in sorted(new, key=lambda name: self.tensors[name].nbytes, reverse=True):
                replica = min(loads, key=loads.__getitem__)
                loads[replica] += self.tensors[name].nbytes
                owners[name] = self.order.rank_of(replica, stage.index)
        for name, tensor in self.tensors.items():
            if isinstance(tensor, nn.Parameter):
                owners.setdefault(name, 0)
        return owners

    def ship(self, program: Program) -> None:
        """Send each rank its stage of a program, and the tensors and modules that it does not have yet."""
        from autopipe.generate.parts import inputs_of_stages

        names = {id(tensor): name for name, tensor in self.tensors.items()}
        forms = program.forms(self.model, names)
        unread = [name for name in self._owners if not any(name in form["reads"] for form in forms)]
        self.inputs[program.number] = inputs_of_stages(program.recording.graph, program.plan)
        for stage, form in enumerate(forms):
            for name in form["reads"]:  # buffers belong to the last replica, which alone runs every kind of call
                self._owners.setdefault(name, self.order.rank_of(self.order.last_replica, stage))
        for rank in range(self.order.num_ranks):
            form = dict(forms[self.order.stage_of(rank)])
            more = [name for name in unread if self._owners[name] == rank]
            self.ranks.send(rank, ["program", self._form(rank, form, more, program)])

    def _form(self, rank: int, form: dict[str, Any], more: list[str], program: Program) -> dict[str, Any]:
        tensors, owners, order = self.tensors, self._owners, self.order
        of_stage = form.pop("reads")
        reads = [*of_stage, *more]
        new = [name for name in reads if name not in self.sent[rank]]
        self.sent[rank].update(new)
        form["tensors"] = {
            name: (tensors[name], isinstance(tensors[name], nn.Parameter), tensors[name].requires_grad) for name in new
        }
        form["owned"] = [name for name in reads if owners[name] == rank]
        form["owners"] = {
            name: order.replica_of(owners[name])
            for name in of_stage
            if order.stage_of(owners[name]) == order.stage_of(rank)
        }
        form["ties"] = [(tie.parameter, (tie.owner, *tie.copies)) for tie in program.plan.ties]
        form["modules"] = {p: m for p, m in form["modules"].items() if p not in self._modules[rank]}
        self._modules[rank].update(form["modules"])
        form["separate"] = not program.uses_often
        form["outputs"] = [(output.shape, output.dtype, output.grad) for output in program.recording.outputs]
        constants = program.recording.constants
        form["compiled"] = self.compiles
        form["placed"] = [name for name, value in constants.items() if value.device.type != CPU.type]
        form["files"] = files_of(self.ranks.folder / form["folder"]) if self.ranks.needs_files(rank) else {}
        return form

    def forget(self, program: Program) -> None:
        """Forget a program that no later call uses."""
        del self.inputs[program.number]
