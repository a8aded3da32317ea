"""The text of the script of a plain loop: an independent reference for a run, which does not import autopipe."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autopipe.commands.plain.compare import comparison, refusal
from autopipe.commands.plain.cutting import SAMPLES, SPLIT
from autopipe.commands.plain.draws import DRAWS, OPAQUE
from autopipe.workload.hooks.calling import Form
from autopipe.workload.target.scripts import imports_its_name, package_of


@dataclass(frozen=True, slots=True)
class DivisorText:
    """The divisor of the loss, as text."""

    imports: tuple[str, ...]  # lines
    names: Mapping[int, str]  # index among the leaves of a batch -> the variable of that leaf
    body: tuple[str, ...]  # lines that compute the results
    results: str  # a tuple with one expression per term of the loss
    terms: int  # of the loss
    penalty: bool  # a term does not depend on the batch


@dataclass(frozen=True, slots=True)
class PlainLoop:
    """The source text of each part of the training loop, and its settings."""

    title: str  # one sentence
    modules: Mapping[str, str]  # variable -> the user's file or module
    setup: tuple[str, ...]  # statements after the imports
    build: str  # the expression that builds the model
    data: str  # the expression that returns an iterable of batches
    loss: str  # the expression of the loss function; "" if the model's output contains the loss
    optimizer: str  # the expression that builds the optimizer
    scheduler: str  # the expression that builds the scheduler, or ""
    batch: Form  # how a batch is passed to the model
    seed: int
    steps: int
    batch_size: int | None  # None: the data chooses its own
    microbatches: int  # per batch
    threads: int
    device: str
    draws: bool  # the model draws random numbers
    opaque: tuple[str, ...]  # paths of the opaque modules
    weighted: bool  # the loss function returns (loss, weight)
    learning_rate: float | None = None  # set after the optimizer is built
    clip: float = 0.0  # largest gradient norm; 0: no clipping
    staleness: int | Mapping[str, int] | None = None  # of all parameters, or by parameter; None for 0
    autocast: str = ""  # a dtype, or ""
    divisor: DivisorText | None = None
    # index among the leaves of a batch -> the dimension that counts the samples; {} for dimension 0
    dimensions: Mapping[int, int] = field(default_factory=dict)
    # how a batch is split: along the "first" dimension, "along" ``dimensions``, by the user's "hook", or not ("whole")
    cut: str = "first"
    counted: str = "first"  # where samples are counted: as ``cut``, or in the first dimension of the "target"
    own_loss: str = ""  # prefix of the names of the loss's own parameters, "" if it has none
    after_step: str = ""  # the function to call after each step, or ""
    ema: float = 0.0  # decay of averaged weights; 0: none
    notes: tuple[str, ...] = field(default=())  # for the docstring of the script


_HEAD = '''
def seed_of(*parts):
    """Return the seed of some numbers: SplitMix64's finalizer is applied after each is added."""
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state >> 1


def seed_all(seed):
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def random_state(saved=None):
    """Return the state of every generator, after restoring a saved one if given."""
    if saved is not None:
        torch.set_rng_state(saved[0]), np.random.set_state(saved[1]), random.setstate(saved[2])
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def load(location, name="", root=""):
    """Import the user's file, or a module. ``root``: the folder of the package that contains the file."""
    if root or not location.endswith(".py"):
        sys.path[:0] = [root] if root else []
        return importlib.import_module(name or location)
    sys.path.insert(0, os.path.dirname(location))
    name = name or os.path.basename(location)[:-3]
    spec = importlib.util.spec_from_file_location(name if name not in sys.modules else f"users_{name}", location)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
'''

_BATCHES = '''
def batches():
    """Yield the minibatches. Each epoch calls the data hook again, with a different seed."""
    for epoch in itertools.count():
        outside = random_state()
        seed_all(seed_of(SEED, 0, epoch, 1 << 40))
        iterator = iter({data})
        while (item := next(iterator, None)) is not None:
            inside = random_state()
            random_state(outside)
            yield {{str(k): v for k, v in item.items()}} if isinstance(item, Mapping) else tuple(item)
            outside = random_state()
            random_state(inside)
        random_state(outside)
'''


def _load_arguments(location: str) -> str:
    """Return the arguments of ``load``: the file, and the module name that it needs if that is not the file's."""
    path = Path(location)
    if path.suffix == ".py" and (package := package_of(path)) is not None:
        return f"{location!r}, {package.name!r}, {str(package.root)!r}"
    if path.suffix == ".py" and imports_its_name(path):
        return f"{location!r}, {f'users_{path.stem}'!r}"
    return repr(location)


def script(loop: PlainLoop) -> str:
    """Return the text of the script."""
    parts = [_docstring(loop), _imports(loop), refusal(averages=bool(loop.ema)), _constants(loop), _HEAD]
    parts += [DRAWS] if loop.draws else []
    parts += [OPAQUE] if loop.opaque else []
    parts += [_BATCHES.format(data=loop.data), SAMPLES[loop.counted], SPLIT[loop.cut]]
    parts += [_shares(loop), _loss(loop), _training(loop), comparison(loop.own_loss, averages=bool(loop.ema))]
    return "\n".join(part.strip("\n") + "\n" for part in _spaced(parts))


def _spaced(parts: list[str]) -> list[str]:
    """Return the parts with an empty line more before each function and class."""
    spaced: list[str] = []
    for part in parts:
        text = part.strip("\n")
        if text:
            spaced.append(f"\n{text}" if text.startswith(("def ", "class ")) and spaced else text)
    return spaced


def _docstring(loop: PlainLoop) -> str:
    # names from a plan may contain any character, but must not end the docstring
    title, *texts = (text.replace("\\", "/").replace('"', "'") for text in (loop.title, *loop.notes))
    notes = "".join(f"\n{textwrap.fill(note, 116)}\n" for note in texts)
    return f'''"""{title}

Written by `autopipe plain`. It does not import autopipe.
{notes}
    python loop.py                      trains, and writes plain.pt
    python loop.py model.safetensors    trains, and compares with exported weights, tensor by tensor
"""'''


def _imports(loop: PlainLoop) -> str:
    lines = ["import importlib.util", "import itertools", "import os", "import random", "import sys"]
    lines += ["from collections.abc import Mapping", "", "import numpy as np", "import torch"]
    lines += ["import torch.utils.checkpoint"] if loop.draws else []
    lines += loop.divisor.imports if loop.divisor is not None else ()
    lines += ["from torch.utils import _pytree as pytree"]
    lines += ["from torch.utils._python_dispatch import TorchDispatchMode"] if loop.draws else []
    return "\n".join(dict.fromkeys(line for line in lines if line)).replace("import numpy", "\nimport numpy")


def _constants(loop: PlainLoop) -> str:
    lines = [
        f"SEED, STEPS, MICROBATCHES = {loop.seed}, {loop.steps}, {loop.microbatches}",
        f"torch.set_num_threads({loop.threads})  # another number of threads adds in another order",
    ]
    if loop.batch_size is not None:
        lines.insert(1, f"BATCH_SIZE = {loop.batch_size}")
    if loop.dimensions:
        lines.insert(1, f"DIMENSIONS = {dict(loop.dimensions)}  # tensor of a batch -> dimension of its samples")
    if loop.device != "cpu":
        lines.insert(1, f"DEVICE = {loop.device!r}")
    if loop.staleness is not None:
        lines.insert(1, f"STALENESS = {_literal(loop.staleness)}  # age of the weights of a gradient, in steps")
    return "\n".join(lines)


def _literal(staleness: int | Mapping[str, int]) -> str:
    if isinstance(staleness, int):
        return str(staleness)
    rows = "".join(f"    {name!r}: {delta},\n" for name, delta in staleness.items())
    return f"{{\n{rows}}}"


def _shares(loop: PlainLoop) -> str:
    """Return the functions that compute the weight of each microbatch."""
    if loop.weighted:
        return ""
    if loop.divisor is None:
        return '''
def shares(parts, batch):
    """Return the weight of each microbatch. The loss is a mean over samples."""
    return [samples(part) / sum(map(samples, parts)) for part in parts]
'''
    divisor = loop.divisor
    leaves = "".join(f"    {name} = leaves[{position}]\n" for position, name in divisor.names.items())
    body = "".join(f"    {line}\n" if line else "\n" for line in divisor.body)
    read = "    leaves = pytree.tree_leaves(batch)\n" if leaves else ""
    text = f'''
def divisors(batch):
    """Return the divisor of each term of the loss."""
{read}{leaves}{body}    numbers = [float(number) for number in {divisor.results}]
    return [int(number) if number.is_integer() else number for number in numbers]


def shares(parts, batch):
    """Return the weight of each microbatch: the divisor of its loss, relative to that of the whole batch."""
    each = [divisors(part) for part in parts]
    whole = {"[sum(terms) for terms in zip(*each)]" if loop.cut in ("hook", "whole") else "divisors(batch)"}
    by_term = [[numbers[term] / total for numbers in each] for term, total in enumerate(whole) if total]
    by_samples = [samples(part) / sum(map(samples, parts)) for part in parts]
'''
    if divisor.terms == 1 and not divisor.penalty:
        return text + "    return by_term[0] if by_term else by_samples\n"
    penalty = "    difference = max([difference, *(abs(sum(one) - 1) for one in by_term)])\n" if divisor.penalty else ""
    return f"""{text}    if not by_term:
        return by_samples
    difference = max(abs(a - b) for one in by_term for other in by_term for a, b in zip(one, other))
{penalty}    # if the terms disagree, weight by samples
    return by_samples if difference > 1e-6 or by_samples in by_term else by_term[0]
"""


def _loss(loop: PlainLoop) -> str:
    call = {
        "dict": "output, target = model(**batch), batch",
        "whole dict": "output, target = model(batch), batch",
        "mapping": "(inputs, target) = batch\n    output = model(**inputs)",
        "tuple": "(inputs, target) = batch\n    output = model(*inputs)",
        "tuple and target": "(inputs, target) = batch\n    output = model(*inputs, target)",
        "tensor": "(inputs, target) = batch\n    output = model(inputs)",
        "tensor and target": "(inputs, target) = batch\n    output = model(inputs, target)",
    }[loop.batch]
    if loop.loss:
        result = "return criterion(output, target)"
    else:
        result = (
            "if isinstance(output, torch.Tensor):\n        return output\n"
            "    if type(output) is tuple:\n"
            "        return next(value for value in output if isinstance(value, torch.Tensor) and not value.dim())\n"
            '    return output["loss"] if isinstance(output, Mapping) and "loss" in output else output.loss'
        )
    return f"def loss_of(batch):\n    {call}\n    {result}\n"


def _training(loop: PlainLoop) -> str:
    loads = [f"{name} = load({_load_arguments(location)})" for name, location in loop.modules.items()]
    lines = ["", "seed_all(SEED)", loads[0], *(["seed_all(SEED)", *loads[1:]] if loads[1:] else [])]
    lines += [
        *loop.setup,
        "seed_all(SEED)",
        f"model = {loop.build}",
        "if len({module.training for module in model.modules()}) == 1:  # otherwise keep the mode of each module",
    ]
    lines += ["    model.train()"]
    lines += ["model.to(DEVICE)"] if loop.device != "cpu" else []
    lines += [f"criterion = {loop.loss}"] if loop.loss else []
    lines += ["criterion.to(DEVICE)"] if loop.own_loss and loop.device != "cpu" else []
    if loop.opaque:
        lines += ["inside = Inside()", f"for path in {list(loop.opaque)!r}:"]
        lines += ["    model.get_submodule(path).register_forward_pre_hook(inside.enter, prepend=True)"]
        lines += ["    model.get_submodule(path).register_forward_hook(inside.leave, always_call=True)"]
    lines += ["parameters = dict(model.named_parameters())"]
    if loop.own_loss:
        lines += [f"parameters.update(criterion.named_parameters(prefix={loop.own_loss.rstrip('.')!r}))"]
    lines += ["trained = [(name, parameter) for name, parameter in parameters.items() if parameter.requires_grad]"]
    lines += [f"optimizer = {loop.optimizer}"]
    if loop.learning_rate is not None:
        lines += ["for group in optimizer.param_groups:", f"    group['lr'] = {loop.learning_rate!r}"]
    lines += [f"scheduler = {loop.scheduler}"] if loop.scheduler else []
    stale = loop.staleness is not None
    if stale:
        lines += ["versions = {0: {name: parameter.data for name, parameter in parameters.items()}}"]
    lines += ["averages = {}"] if loop.ema else []
    lines += ["for step, batch in zip(range(STEPS), batches()):"]
    return "\n".join([*lines, *(f"    {line}" if line else "" for line in _step(loop, stale=stale))]) + "\n"


def _step(loop: PlainLoop, *, stale: bool) -> list[str]:
    lines = []
    if stale:
        delta = "STALENESS" if isinstance(loop.staleness, int) else "STALENESS.get(name, 0)"
        lines += ["for name, parameter in parameters.items():"]
        lines += [f"    parameter.data = versions[max(step - {delta}, 0)][name]"]
    lines += ["total, weights, parts = 0.0, 0.0, split(batch)"]
    loop_head = "for index, part in enumerate(parts):"
    if not loop.weighted:
        loop_head = "for index, (part, share) in enumerate(zip(parts, shares(parts, batch))):"
    lines += [loop_head]
    if loop.device != "cpu":
        lines += ["    part = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.to(DEVICE), part)"]
    contexts = ["Draws(step, index)"] if loop.draws else []
    contexts += [f"torch.autocast({loop.device!r}, dtype={loop.autocast})"] if loop.autocast else []
    result = "loss, weight = loss_of(part)" if loop.weighted else "loss = loss_of(part)"
    lines += [f"    with {', '.join(contexts)}:", f"        {result}"] if contexts else [f"    {result}"]
    if loop.weighted:
        lines += ["    weight = float(weight)", "    weights += weight", "    loss = loss * weight"]
    else:
        lines += ["    loss = loss * share if share else torch.zeros(())  # with a share of 0, the loss is 0 / 0"]
    lines += ["    if loss.requires_grad:", "        loss.backward()", "    total += float(loss.detach())"]
    if loop.weighted:
        lines += ["for parameter in parameters.values():", "    if parameter.grad is not None:"]
        lines += ["        parameter.grad /= weights or 1.0", "total /= weights or 1.0"]
    if stale:
        lines += ["for name, parameter in parameters.items():"]
        lines += ["    parameter.data = versions[step][name].clone()"]
    if loop.clip:
        lines += [f"torch.nn.utils.clip_grad_norm_([parameter for _, parameter in trained], {loop.clip!r})"]
    lines += ["optimizer.step()", "optimizer.zero_grad(set_to_none=True)"]
    lines += [f"{loop.after_step}(list(parameters.items()), step)"] if loop.after_step else []
    if loop.ema:
        lines += ["for name, parameter in parameters.items():"]
        lines += ["    weight = parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)"]
        lines += ["    if name in averages:", f"        averages[name].lerp_(weight, 1 - {loop.ema!r})"]
        lines += ["    else:", "        averages[name] = weight"]
    lines += ["scheduler.step()"] if loop.scheduler else []
    if stale:
        most = "STALENESS" if isinstance(loop.staleness, int) else "max(STALENESS.values())"
        lines += ["versions[step + 1] = {name: parameter.data for name, parameter in parameters.items()}"]
        lines += [f"versions.pop(step - {most}, None)"]
    lines += ['print(f"step {step + 1}: loss {total:.6f}")']
    return lines
