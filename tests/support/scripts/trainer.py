"""A trainer class: batches as dicts, outputs as a dataclass, early stopping, averaged weights, the best ones kept."""

import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn


@dataclass
class Output:
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def __getitem__(self, key):
        return getattr(self, key)


torch.utils._pytree.register_dataclass(Output)


class Classifier(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.config = {"width": width, "smoothing": 0.1}
        self.body = nn.Sequential(
            nn.Linear(6, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()
        )
        self.head = nn.Linear(width, 3)

    def forward(self, features, labels=None):
        logits = self.head(self.body(features))
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits, labels, label_smoothing=self.config["smoothing"])
        return Output(loss, logits)


class Trainer:
    def __init__(self, model, features, labels):
        self.model, self.features, self.labels = model, features, labels
        self.average = copy.deepcopy(model).requires_grad_(False)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        self.schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0)
        self.best, self.best_state, self.bad = float("inf"), None, 0
        self.random = np.random.default_rng(4)

    def step(self):
        rows = torch.from_numpy(self.random.permutation(len(self.features))[:16])
        output = self.model(features=self.features[rows], labels=self.labels[rows])
        output.loss.backward()
        nn.utils.clip_grad_value_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for a, p in zip(self.average.parameters(), self.model.parameters(), strict=True):
                a.lerp_(p, 0.2)
        return output.loss.detach()

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        output = self.model(features=self.features)
        right = (output["logits"].argmax(-1) == self.labels).float().mean()
        loss = nn.functional.cross_entropy(output.logits, self.labels)
        average = nn.functional.cross_entropy(self.average(self.features).logits, self.labels)
        self.model.train()
        return loss.item(), right.item(), average.item()

    def fit(self):
        for epoch in range(6):
            losses = torch.stack([self.step() for _ in range(3)])
            value, right, average = self.evaluate()
            self.schedule.step(value)
            print(f"{epoch} {losses.mean().item():.17g} {value:.17g} {right:.6f} {average:.17g}")
            print(self.optimizer.param_groups[0]["lr"], losses)
            if value < self.best:
                self.best, self.best_state, self.bad = value, copy.deepcopy(self.model.state_dict()), 0
            else:
                self.bad += 1
                if self.bad > 1:
                    break
        self.model.load_state_dict(self.best_state)
        print(self.evaluate())


if __name__ == "__main__":
    torch.manual_seed(2)
    torch.set_num_threads(1)
    x = torch.randn(60, 6)
    trainer = Trainer(Classifier(12), x, x[:, :3].argmax(1))
    trainer.fit()
    torch.save(trainer.model.state_dict(), "trainer.pt")
