"""Names of values in messages of Mosaic GPU, without printing a kernel for each.

Where layouts are inferred, values are sorted by such names, and JAX gets each by printing the operation, for which MLIR
numbers all values of the kernel: half of what it takes to lower a large one. Here they are numbered once.
"""

from typing import Any

from jax.experimental.mosaic.gpu import layout_inference
from jax.experimental.mosaic.gpu.layout_inference import VariableType, ir

_LETTERS = {VariableType.OPERAND: "o", VariableType.RESULT: "r", VariableType.ARGUMENT: "a"}
PRINTED = layout_inference.ValueSite.__str__
# The kernel that was asked for last, and the names in it. Replaced as one: several threads may lower.
_last: list[tuple[Any, dict[Any, str]]] = [(None, {})]


def install() -> None:
    """For all that is lowered from now on; the order of values, and so what is lowered, stays the same."""
    layout_inference.ValueSite.__str__ = _text  # type: ignore[method-assign]


def _text(site: Any) -> str:
    operation = root = site.operation.operation
    while root.parent is not None:
        root = root.parent.operation
    kernel, names = _last[0]
    if kernel is None or kernel != root or operation not in names:  # another kernel, or something new in it
        names = _names_within(root)
        _last[0] = root, names
    return f"{names[operation]}:{_LETTERS[site.type]}-{site.index}"


def _names_within(root: Any) -> dict[Any, str]:
    """As MLIR prints them: `%7 = arith.addf`, `%7:2` of several results, `scf.yield` of none."""
    state = ir.AsmState(root)
    names: dict[Any, str] = {}

    def note(operation: Any) -> Any:
        names[operation] = operation.name
        if operation.results:
            first, *others = operation.results
            number = first.get_name(state).split("#")[0]
            names[operation] = f"{number}:{len(others) + 1}" if others else f"{number} = {operation.name}"
        return ir.WalkResult.ADVANCE

    root.walk(note, ir.WalkOrder.PRE_ORDER)
    return names
