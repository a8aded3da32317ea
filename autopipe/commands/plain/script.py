"""The text of the script of a plain loop: the files of ``autopipe.reference``, and the settings of one training."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from autopipe.workload.hooks.calling import Form
from autopipe.workload.target.scripts import imports_its_name, package_of


@dataclass(frozen=True, slots=True)
class DivisorText:
    """The divisor of the loss, as text."""

    imports: tuple[str, ...]  # lines
    names: Mapping[int, str]  # index among the leaves of a batch -> the variable of that leaf
    body: tuple[str, ...]  # lines that compute the results
    results: str  # a tuple with one expression per term of the loss
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
    modules = ["minibatches", *(["seeded_draws"] if loop.draws else []), "training_loop", "standalone"]
    imports, sources = _of_reference(modules, loop.divisor.imports if loop.divisor is not None else ())
    head = "\n\n".join([_docstring(loop), imports, _constants(loop)])
    parts = [head, *sources, _subject(loop), _loss(loop), _factors(loop), _training(loop)]
    return "\n\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _of_reference(modules: Iterable[str], more: Iterable[str]) -> tuple[str, list[str]]:
    """Return the imports of modules of ``autopipe.reference``, with ``more`` imports, and their other statements."""
    sources, trees = [], [ast.parse(line) for line in more]
    for module in modules:
        text = (resources.files("autopipe.reference") / f"{module}.py").read_text(encoding="utf-8")
        tree = ast.parse(text)
        last = max(node.end_lineno or 0 for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)))
        sources.append(re.sub(r"  # type: ignore.*", "", "\n".join(text.splitlines()[last:])).strip("\n"))
        trees.append(tree)
    return _imports([node for tree in trees for node in tree.body]), sources


def _imports(statements: Iterable[ast.stmt]) -> str:
    """Return the imports among statements, each name once, without those of autopipe itself."""
    lines: set[str] = set()
    names: dict[str, set[str]] = {}
    for node in statements:
        if isinstance(node, ast.Import):
            lines |= {f"import {ast.unparse(alias)}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            names.setdefault(node.module or "", set()).update(map(ast.unparse, node.names))
    froms = [f"from {module} import {', '.join(sorted(some))}" for module, some in sorted(names.items())]
    every = [line for line in (*sorted(lines), *froms) if not line.startswith("from autopipe")]
    of_torch = [line for line in every if line.split()[1].partition(".")[0] in ("numpy", "torch")]
    others = [line for line in every if line not in of_torch]
    return "\n".join(["from __future__ import annotations", "", *others, "", *of_torch])


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


def _constants(loop: PlainLoop) -> str:
    lines = [f"SEED, STEPS, MICROBATCHES = {loop.seed}, {loop.steps}, {loop.microbatches}"]
    lines += [f"BATCH_SIZE = {loop.batch_size}"] if loop.batch_size is not None else []
    lines += [f"DEVICE = {loop.device!r}"] if loop.device != "cpu" else []
    lines += [f"torch.set_num_threads({loop.threads})  # another number of threads adds in another order"]
    return "\n".join(lines)


def _subject(loop: PlainLoop) -> str:
    """Return the statements that build what is trained."""
    loads = [f"{name} = load({_load_arguments(location)})" for name, location in loop.modules.items()]
    lines = ["", f"if message := missing_file(averages={bool(loop.ema)}):", "    sys.exit(message)"]
    lines += ["seed_all(SEED)", loads[0], *(["seed_all(SEED)", *loads[1:]] if loads[1:] else [])]
    lines += [
        *loop.setup,
        "seed_all(SEED)",
        f"model = {loop.build}",
        "if len({module.training for module in model.modules()}) == 1:  # otherwise keep the mode of each module",
        "    model.train()",
    ]
    lines += ["model.to(DEVICE)"] if loop.device != "cpu" else []
    lines += [f"criterion = {loop.loss}"] if loop.loss else []
    lines += ["criterion.to(DEVICE)"] if loop.own_loss and loop.device != "cpu" else []
    if loop.opaque:
        lines += [f"opaque = [model.get_submodule(path) for path in {list(loop.opaque)!r}]"]
    lines += ["parameters = dict(model.named_parameters())"]
    if loop.own_loss:
        lines += [f"parameters.update(criterion.named_parameters(prefix={loop.own_loss.rstrip('.')!r}))"]
    lines += ["trained = [(name, parameter) for name, parameter in parameters.items() if parameter.requires_grad]"]
    lines += [f"optimizer = {loop.optimizer}"]
    if loop.learning_rate is not None:
        lines += ["for group in optimizer.param_groups:", f"    group['lr'] = {loop.learning_rate!r}"]
    lines += [f"scheduler = {loop.scheduler}"] if loop.scheduler else []
    return "\n".join(lines)


def _loss(loop: PlainLoop) -> str:
    """Return the function that computes the loss of a microbatch."""
    call = {
        "dict": ["output, target = model(**batch), batch"],
        "whole dict": ["output, target = model(batch), batch"],
        "mapping": ["inputs, target = batch", "output = model(**inputs)"],
        "tuple": ["inputs, target = batch", "output = model(*inputs)"],
        "tuple and target": ["inputs, target = batch", "output = model(*inputs, target)"],
        "tensor": ["inputs, target = batch", "output = model(inputs)"],
        "tensor and target": ["inputs, target = batch", "output = model(inputs, target)"],
    }[loop.batch]
    if loop.weighted:
        call += ["loss, weight = criterion(output, target)"]
    elif loop.loss:
        call += ["loss, weight = criterion(output, target), None"]
    else:
        call += [
            "loss, weight = output, None",
            "if type(output) is tuple:",
            "    loss = next(value for value in output if isinstance(value, torch.Tensor) and not value.dim())",
            "elif not isinstance(output, torch.Tensor):",
            '    loss = output["loss"] if isinstance(output, Mapping) and "loss" in output else output.loss',
        ]
    contexts = [f"Draws(SEED, step, microbatch{', opaque=opaque' if loop.opaque else ''})"] if loop.draws else []
    contexts += [f"torch.autocast({loop.device!r}, dtype={loop.autocast})"] if loop.autocast else []
    lines = ["def loss_of(batch, step, microbatch):"]
    if loop.device != "cpu":
        lines += ["    batch = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.to(DEVICE), batch)"]
    lines += [f"    with {', '.join(contexts)}:"] if contexts else []
    lines += [f"{' ' * (8 if contexts else 4)}{line}" for line in call]
    if loop.weighted:
        lines += ["    if not isinstance(weight, torch.Tensor):"]
        lines += ["        weight = torch.full((), weight, dtype=loss.dtype, device=loss.device)"]
    return "\n".join(["", *lines, "    return loss, weight"])


_SAMPLES = {
    "first": "    return samples_in(batch, first_dimensions(batch))",
    "along": "    return samples_in(batch, DIMENSIONS)",
    "target": """    leaves = pytree.tree_leaves(batch[1] if isinstance(batch, tuple) else batch)
    return next(leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim())""",
}
"""By ``PlainLoop.counted``, the body of the function that counts the samples of a batch."""


def _factors(loop: PlainLoop) -> str:
    """Return the functions that split a batch, and compute the factor of each microbatch."""
    text = ""
    if loop.counted == "along":
        text += f"\nDIMENSIONS = {dict(loop.dimensions)}  # tensor of a batch -> dimension of its samples\n\n"
    if loop.cut == "hook":
        text += """
def microbatches_of(batch):
    parts = users.split(batch, MICROBATCHES) if MICROBATCHES > 1 else [batch]
    return [part if isinstance(part, Mapping) else tuple(part) for part in parts]

"""
    if loop.weighted or loop.cut == "whole":
        return text
    text += f"\ndef samples(batch):\n{_SAMPLES[loop.counted]}\n\n"
    divisor = loop.divisor
    if divisor is None:
        return f"""{text}
def factors(batch, microbatches):
    return factors_of([samples(part) for part in microbatches])[0]
"""
    leaves = "".join(f"    {name} = leaves[{position}]\n" for position, name in divisor.names.items())
    body = "".join(f"    {line}\n" if line else "\n" for line in divisor.body)
    read = "    leaves = pytree.tree_leaves(batch)\n" if leaves else ""
    return f"""{text}
def divisors(batch):
    # the divisor of each term of the loss
{read}{leaves}{body}    numbers = [float(number) for number in {divisor.results}]
    return [int(number) if number.is_integer() else number for number in numbers]


def factors(batch, microbatches):
    each = [divisors(part) for part in microbatches]
    whole = {"[sum(terms) for terms in zip(*each)]" if loop.cut == "hook" else "divisors(batch)"}
    return factors_of([samples(part) for part in microbatches], each, whole, penalty={divisor.penalty})[0]
"""


def _training(loop: PlainLoop) -> str:
    """Return the statements that train."""
    arguments = [
        "model",
        "parameters",
        "loss_of",
        "optimizer",
        *(["scheduler"] if loop.scheduler else []),
        *([f"scaler=torch.amp.GradScaler({loop.device!r})"] if loop.autocast == "torch.float16" else []),
        *([f"staleness={_ages(loop.staleness)}"] if loop.staleness is not None else []),
        *([f"clip={loop.clip!r}"] if loop.clip else []),
        *([f"ema={loop.ema!r}"] if loop.ema else []),
        *([f"after_step={loop.after_step}"] if loop.after_step else []),
    ]
    cut = {
        "hook": "microbatches_of(batch)",
        "whole": "[batch]",
        "along": "split(batch, MICROBATCHES, DIMENSIONS)",
        "first": "split(batch, MICROBATCHES, first_dimensions(batch))",
    }[loop.cut]
    factors = "()" if loop.weighted else "[1.0]" if loop.cut == "whole" else "factors(batch, microbatches)"
    modules = '{"": model}'
    if loop.own_loss:
        modules = f'{{"": model, {loop.own_loss!r}: criterion}}'
    return f"""loop = TrainingLoop({", ".join(arguments)})
for step, batch in zip(range(STEPS), read_in_order(lambda: {loop.data}, SEED)):
    microbatches = {cut}
    loss = loop.train(microbatches, {factors})
    print(f"step {{step + 1}}: loss {{loss:.6f}}")
sys.exit(written_or_compared(loop, {modules}))
"""


def _ages(staleness: int | Mapping[str, int]) -> str:
    """Return the expression of the age of the weights of a gradient, in steps, by name of the parameter."""
    if isinstance(staleness, int):
        return f"dict.fromkeys(parameters, {staleness})"
    rows = "".join(f"    {name!r}: {delta},\n" for name, delta in staleness.items())
    return f"{{\n{rows}}}"
