"""``LossCollector``: the loss of a minibatch, from the ranks that run the last stage to rank 0."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopipe.ir.messages import loss_channel
from autopipe.ir.schedule import ScheduleSpec
from autopipe.runtime.events import Reporter
from autopipe.runtime.stage_runner import StageRunner
from autopipe.runtime.step.scalars import read_together
from autopipe.runtime.transport.base import Transport


class LossCollector:
    """One rank's part in it. ``weighted``: the user's loss returns its own weight."""

    def __init__(
        self,
        request: ScheduleSpec,
        runners: Mapping[int, StageRunner],
        transport: Transport,
        reporter: Reporter,
        *,
        weighted: bool,
    ) -> None:
        self.weighted = weighted
        self._request, self._transport, self._reporter = request, transport, reporter
        # the stage that computes the loss
        self.stage = request.num_stages - 1
        self._runner = runners.get(self.stage)
        self._sent: set[int] = set()
        # the losses and weights of the microbatches that ran here, by minibatch
        self._read: dict[int, torch.Tensor] = {}

    def _shares(self, minibatch: int) -> torch.Tensor:
        """Return [2, microbatches]: share of the loss and weight of every microbatch that ran here, zero elsewhere."""
        shares = torch.zeros(2, self._request.num_microbatches, dtype=torch.float64)
        if self._runner is not None:
            losses = {j: entry for (t, j), entry in self._runner.losses.items() if t == minibatch}
            weights = {j: weight for j, (_, weight) in losses.items() if weight is not None}
            tensors = [*(loss for loss, _ in losses.values()), *weights.values()]
            values = self._read.get(minibatch)
            if values is None or len(values) != len(tensors):  # once for each minibatch
                values = self._read[minibatch] = read_together(tensors)
            shares[0, list(losses)] = values[: len(losses)]
            shares[1, list(weights)] = values[len(losses) :]
        return shares

    def weights(self, minibatch: int) -> torch.Tensor:
        """Return the weight of every microbatch that ran on this rank, zero for the others."""
        return self._shares(minibatch)[1]

    def is_finite(self, minibatch: int) -> bool:
        """Return whether the losses that this rank computed are finite."""
        return self._runner is None or bool(self._shares(minibatch).isfinite().all())

    def send(self, minibatch: int) -> None:
        """Send rank 0 this rank's shares of a minibatch, once. Rank 0 receives them in ``collect``."""
        rank = self._transport.rank
        if self._runner is not None and rank != 0 and minibatch not in self._sent:
            self._sent.add(minibatch)
            self._transport.send(loss_channel(self._request, rank), self._shares(minibatch))

    def collect(self, minibatch: int) -> float | None:
        """Return the loss of a minibatch on the first process, None elsewhere. Every rank calls it."""
        rank = self._transport.rank
        total = torch.zeros(2, self._request.num_microbatches, dtype=torch.float64)
        if self._runner is not None:
            self.send(minibatch)
            total += self._shares(minibatch)
            self._sent.discard(minibatch)
            self._read.pop(minibatch, None)
            losses = self._runner.losses
            for key in [key for key in losses if key[0] == minibatch]:
                del losses[key]
        if rank != 0:
            return None
        for other in self._request.stage_ranks[self.stage]:
            if other != 0:
                self._reporter.at("loss", waiting=True)
                channel = loss_channel(self._request, other)
                total += self._transport.receive(channel, total.shape, total.dtype).wait()
        if not self._transport.leads:
            return None
        loss = float(sum(total[0].tolist()))
        return loss / (float(sum(total[1].tolist())) or 1.0) if self.weighted else loss
