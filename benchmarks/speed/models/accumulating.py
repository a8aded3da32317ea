"""A training script in the style of many: the GPT of sample_models, and gradients accumulated over eight batches.

It prints one JSON line per optimizer step: the seconds on the clock, and the mean loss of its batches.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "sample_models"))
import gpt

ACCUMULATED = 8


def main():
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = gpt.build_model(width=arguments.width)
    optimizer = gpt.optimizer(model.named_parameters())
    batches = gpt.data(arguments.batch_size)
    for _ in range(arguments.steps):
        total = torch.zeros(())
        for _ in range(ACCUMULATED):
            ids, target = next(batches)
            output = model(ids)
            loss = F.cross_entropy(output.flatten(0, 1), target.flatten()) / ACCUMULATED
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(json.dumps({"loss": total.item(), "seconds": time.perf_counter()}), flush=True)


main()
