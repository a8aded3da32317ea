"""What only the script of ``autopipe plain`` needs: to import the user's files, and to compare weights with a file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from autopipe.reference.training_loop import TrainingLoop


def load(location: str, name: str = "", root: str = "") -> ModuleType:
    """Import the user's file, or a module. ``root``: the folder of the package that contains the file."""
    if root or not location.endswith(".py"):
        sys.path[:0] = [root] if root else []
        return importlib.import_module(name or location)
    sys.path.insert(0, str(Path(location).parent))
    name = name or Path(location).stem
    spec = importlib.util.spec_from_file_location(name if name not in sys.modules else f"users_{name}", location)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def missing_file(*, averages: bool) -> str:
    """Return the error if the file to compare with is missing, or ""."""
    for name in sys.argv[1:]:
        if not Path(name).is_file() and not (averages and name == "--ema"):
            return f"there is no file {name}: write it with `autopipe export RUN -o {name}`, or give no argument"
    return ""


def written_or_compared(loop: TrainingLoop, modules: Mapping[str, nn.Module]) -> str | bool:
    """Write the weights to plain.pt, or compare them with the file that is the argument, bit for bit.

    Return the argument of ``sys.exit``: what was written, or whether a tensor differs. ``modules``: by prefix of their
    names. With the argument ``--ema``, the averaged weights take the place of the last.
    """
    if "--ema" in sys.argv and not loop.averages:
        return "there are no averaged weights: no step was taken"
    weights: dict[str, torch.Tensor] = {}
    for prefix, module in modules.items():
        weights.update(module.state_dict(prefix=prefix))
        parameters = module.named_parameters(prefix.rstrip("."), remove_duplicate=False)
        for name, parameter in parameters if "--ema" in sys.argv else ():
            first = next(other for other, known in loop.parameters.items() if known is parameter)
            weights[name] = loop.averages[first].to(parameter.dtype)
    files = [name for name in sys.argv[1:] if name != "--ema"]
    if not files:
        torch.save(weights, "plain.pt")
        return "written: plain.pt"
    if files[0].endswith(".safetensors"):
        from safetensors.torch import load_file

        others = load_file(files[0])
    else:
        others = torch.load(files[0], weights_only=True)
    unequal = 0
    for name, tensor in weights.items():
        other = others.get(name)
        if other is None:
            unequal += 1
            sys.stdout.write(f"{name}: missing\n")
        elif not torch.equal(tensor.cpu(), other):
            unequal += 1
            difference = tensor.cpu().to(torch.complex128) - other.to(torch.complex128)
            sys.stdout.write(f"{name}: differs by {difference.abs().max()}\n")
    sys.stdout.write(f"{len(weights) - unequal} of {len(weights)} tensors are equal, bit for bit\n")
    return bool(unequal)
