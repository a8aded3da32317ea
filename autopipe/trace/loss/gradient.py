"""Refuse a loss without a gradient, as ``backward()`` of plain PyTorch does: nothing could be trained."""

from __future__ import annotations

from autopipe.errors import TraceError
from autopipe.ir.graph import Graph, Node


def refuse_without_gradient(graph: Graph) -> None:
    """Refuse a graph whose loss does not require a gradient.

    Raises: TraceError with the cause, and the line nearest to the loss whose result has no gradient any more.
    """
    nodes = {node.name: node for node in graph.nodes}
    specs = {entry.name: entry.spec for entry in graph.inputs}
    specs.update({node.name: node.spec for node in graph.nodes if node.spec is not None})
    loss = graph.outputs[0]
    if loss not in specs or specs[loss].requires_grad:
        return

    def differentiable(node: Node) -> bool:
        """Return whether anything that a call reads requires a gradient."""
        return any(graph.parameters[name].requires_grad for name in node.parameters) or any(
            specs[name].requires_grad if name in specs else differentiable(nodes[name]) for name in node.inputs
        )

    above, waiting = {loss}, [loss]
    while waiting:
        node = nodes.get(waiting.pop())
        new = {*(() if node is None else (*node.inputs, *node.after))} - above
        above |= new
        waiting += new
    what = "the loss has no gradient, so that nothing would be trained, and backward() fails in plain PyTorch"
    if not any(spec.requires_grad for spec in graph.parameters.values()):
        remedy = (
            "set requires_grad of the parameters to train to True, or add a layer to train"
            if graph.parameters
            else "register what is to be trained as an nn.Parameter or a module"
        )
        raise TraceError(f"{what}: no parameter of the model requires a gradient", where=graph.name, remedy=remedy)
    ends = [
        node
        for node in graph.nodes
        if node.name in above and node.name in specs and not specs[node.name].requires_grad and differentiable(node)
    ]
    if not ends:
        raise TraceError(
            f"{what}: it does not depend on any parameter that requires a gradient",
            where=graph.name,
            remedy="compute the loss from the output of the model, or set requires_grad of the parameters that it uses "
            "to True",
        )
    end = ends[-1]
    call = ".data" if end.target == "getattr" else end.target.rpartition(".")[2]
    cause = f"the result of {call} has no gradient, and the loss depends on the parameters through such results only"
    remedy = "compute the loss from a result that has a gradient"
    if "no_grad" in end.context:
        cause = f"{call} runs under torch.no_grad() or torch.inference_mode()"
        remedy = "leave these to the evaluation, outside of the model and the loss"
    elif call in ("detach", "detach_", ".data"):
        remedy = f"remove {call}" + "()" * (call != ".data")
    raise TraceError(f"{what}: {cause}", where=end.place or graph.name, remedy=remedy)
