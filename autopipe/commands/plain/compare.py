"""The last part of the script of a plain loop: writes the weights, or compares them with exported weights."""

from __future__ import annotations

_AVERAGED = """
if "--ema" in sys.argv:  # use the averaged weights instead of the last ones
    sys.argv.remove("--ema")
    for prefix, module in {modules}:
        for name, parameter in module.named_parameters(prefix, remove_duplicate=False):
            first = next(other for other, known in parameters.items() if known is parameter)
            weights[name] = averages[first].to(parameter.dtype)
"""
_COMPARE = """
if len(sys.argv) == 1:
    torch.save(weights, "plain.pt")
    sys.exit("written: plain.pt")
if sys.argv[1].endswith(".safetensors"):
    from safetensors.torch import load_file

    other = load_file(sys.argv[1])
else:
    other = torch.load(sys.argv[1], weights_only=True)
mine = {name: tensor.cpu() for name, tensor in weights.items()}
unequal = [name for name in mine if name not in other or not torch.equal(mine[name], other[name])]
for name in unequal:
    if name in other:
        print(f"{name}: differs by {(mine[name].to(torch.complex128) - other[name].to(torch.complex128)).abs().max()}")
    else:
        print(f"{name}: missing")
print(f"{len(mine) - len(unequal)} of {len(mine)} tensors are equal, bit for bit")
sys.exit(bool(unequal))
"""
_MISSING = """
for name in sys.argv[1:]:
    if not os.path.isfile(name){averaged}:
        sys.exit(f"there is no file {{name}}: write it with `autopipe export RUN -o {{name}}`, or give no argument")
"""


def refusal(*, averages: bool) -> str:
    """Return the statement that ends the script before it trains if the file to compare with is missing."""
    return _MISSING.format(averaged=' and name != "--ema"' if averages else "")


def comparison(own_loss: str, *, averages: bool) -> str:
    """Return the statements. ``own_loss``: prefix of the names of the loss's own parameters, "" if it has none."""
    weights, modules = "dict(model.state_dict())", '(("", model),)'
    if own_loss:
        weights = f"{{**model.state_dict(), **criterion.state_dict(prefix={own_loss!r})}}"
        modules = f'(("", model), ({own_loss.rstrip(".")!r}, criterion))'
    averaged = _AVERAGED.format(modules=modules).strip("\n") + "\n" if averages else ""
    return f"\nweights = {weights}\n{averaged}{_COMPARE.lstrip()}"
