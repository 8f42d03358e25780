"""Computation of a layer's experts over the rows routed to each, registered as "offspec_rows".

The number of an expert's rows depends on the other rows of a pass, and the rounding of a product depends on
its number of rows. So each expert's rows are padded to a row count at which rows are independent of each
other, and a row's expert outputs are summed in the order of the router's choice.

Letters: T rows of a pass, k experts of a row, E experts of a layer, n rows of an expert, H hidden size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from offspec.model.row_counts import STEPS, RowCounts
from offspec.model.torch_functions import bypass_function_modes
from offspec_kernels.backend import choose_backend
from offspec_kernels.row_linear import grouped_linear, row_linear

NAME = "offspec_rows"


# Source of expert weights for a module that does not hold them. It takes the requested experts, the number of
# rows of each, and the total number of rows. It yields each expert, in any order, with its weights, which are
# valid until the next one.
ExpertSource = Callable[[Sequence[int], Sequence[int], int], Iterator[tuple[int, Mapping[str, torch.Tensor]]]]


@dataclass(frozen=True)
class ExpertDevice:
    """Compute device of experts that differs from their layer's.

    It applies to all experts of a layer, whatever is in memory: devices round differently, and a row's bits
    would otherwise depend on earlier requests.

    Args:
        device: Device of the weights. Rows are copied there, and the summed expert outputs back.
        mode: Mode entered for the computation, in place of that of the layer's device.
    """

    device: torch.device
    mode: AbstractContextManager[Any]


def is_experts(module: Any) -> bool:
    """Return whether `run_experts` computes the experts of a transformers module."""
    return hasattr(module, "is_transposed")  # set by transformers on modules that call `run_experts`


def parameter_names(experts: Any) -> tuple[str, ...]:
    """Return the names of each expert's parameters in a module of experts."""
    names = ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")
    return (*names, *(f"{name}_bias" for name in names)) if experts.has_bias else names


def set_row_counts(model: torch.nn.Module, counts: RowCounts) -> None:
    """Make all experts of `model` run at these row counts only. By default they run at any row count."""
    for module in model.modules():
        if is_experts(module):
            module.row_counts = counts  # type: ignore[assignment]


@bypass_function_modes
def run_experts(
    experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of each row's expert outputs, [T, H].

    Args:
        experts: Module with the weights of all experts in transformers' layout, or with a `source`. If it has
            an `expert_device`, its experts are computed there.
        hidden: [T, H], hidden states.
        chosen: [T, k], experts of each row; E or more: none.
        weights: [T, k], weights of the experts' outputs.
    """
    other: ExpertDevice | None = getattr(experts, "expert_device", None)
    if other is None:
        return _run_all(experts, hidden, chosen, weights)
    with other.mode:
        outputs = _run_all(experts, *(tensor.to(other.device) for tensor in (hidden, chosen, weights)))
    return outputs.to(hidden.device)


def _run_all(experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    rows, of_each = chosen.shape
    routed_to, order = chosen.flatten().sort(stable=True)  # pairs of a row and an expert, by expert
    # End of each expert's pairs. Counting the pairs (bincount) would synchronize with the device.
    numbers = torch.arange(1, experts.num_experts + 1, dtype=routed_to.dtype, device=routed_to.device)
    ends = torch.searchsorted(routed_to, numbers)
    if _can_group(experts, hidden, of_each):
        outputs = _grouped_outputs(experts, hidden, order, of_each, ends)
    else:
        outputs = _outputs_one_by_one(experts, hidden, order, of_each, ends)
    first, *others = (outputs.view(rows, of_each, -1) * weights[..., None]).unbind(1)
    total = first.float()
    for part in others:  # a sum over a dimension adds in an order that depends on the shape
        total = total + part
    return total.to(hidden.dtype)


def _outputs_one_by_one(
    experts: Any, hidden: torch.Tensor, order: torch.Tensor, of_each: int, ends: torch.Tensor
) -> torch.Tensor:
    """Return expert outputs per pair, [T k, H]. Synchronizes once, to find which experts to fetch."""
    counts: RowCounts = getattr(experts, "row_counts", None) or RowCounts()
    source: ExpertSource = getattr(experts, "source", None) or partial(_own_weights, experts)
    outputs = hidden.new_zeros(len(order), hidden.shape[1])
    starts = [0, *ends.tolist()]
    routed = [end - start for start, end in pairwise(starts)]
    routed_to = [expert for expert, count in enumerate(routed) if count]
    for expert, own in source(routed_to, [routed[expert] for expert in routed_to], len(hidden)):
        start, count = starts[expert], routed[expert]
        pairs = order[start : start + count]
        places = torch.arange(counts.padded(count), device=hidden.device).clamp_(max=count - 1)
        outputs[pairs] = _run(experts, own, hidden[pairs[places] // of_each])[:count]
    return outputs


def _can_group(experts: Any, hidden: torch.Tensor, of_each: int) -> bool:
    """Return whether all experts run in one grouped product each, without synchronization, with equal bits.

    This requires a GPU that holds all weights, and few enough rows that it takes no more memory than running
    experts one by one. With more rows the synchronization is a small part of the time.
    """
    if hidden.device.type != "cuda" or choose_backend(hidden.device) != "triton":
        return False
    if any(getattr(experts, name, None) is not None for name in ("source", "post_expert_norm")):
        return False
    if len(experts.down_proj) != experts.num_experts:
        return False
    size = hidden.shape[1]
    weights = sum(
        weight[0].numel()
        for name in parameter_names(experts)
        if not name.endswith("_bias") and (weight := getattr(experts, name)).device == hidden.device
    )
    return bool(weights) and len(hidden) * of_each * _inner(size, weights) <= _one_values(
        len(hidden), size, weights
    )


def _grouped_outputs(
    experts: Any, hidden: torch.Tensor, order: torch.Tensor, of_each: int, ends: torch.Tensor
) -> torch.Tensor:
    """Return expert outputs per pair, [T k, H], in one grouped product per matrix."""
    every = torch.arange(len(order), device=order.device)
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    inner = _grouped(experts, name, hidden, order // of_each, every, ends)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    return _grouped(experts, "down_proj", inner, every, order, ends)


def _grouped(
    experts: Any,
    name: str,
    rows: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    weights = getattr(experts, name)
    weights = weights.mT if experts.is_transposed else weights
    bias = getattr(experts, name + "_bias") if experts.has_bias else None
    return grouped_linear(rows, weights, bias, sources, targets, ends)


def scratch_bytes(rows: int, chosen: int, hidden: int, weights: int, item: int) -> int:
    """Return the maximum bytes that experts allocate while they run.

    Args:
        rows: T, rows of a pass.
        chosen: k, experts of a row.
        hidden: H, hidden size.
        weights: Number of weights of one expert.
        item: Bytes of a value.
    """
    one = _one_values(rows, hidden, weights)
    return rows * ((2 * chosen + 2) * hidden * item + 8 * hidden + 40 * chosen) + one * item


def _one_values(rows: int, hidden: int, weights: int) -> int:
    """Return the values of one expert for all rows, plus its weights, which a product may copy reordered."""
    return (rows + STEPS[-1]) * (2 * hidden + _inner(hidden, weights)) + weights


def _inner(hidden: int, weights: int) -> int:
    """Return a row's values inside an expert: gates, products, a copy; at least 2 of 3 matrices [I, H]."""
    return 2 * weights // hidden


def _own_weights(
    module: Any, experts: Sequence[int], counts: Sequence[int], rows: int
) -> Iterator[tuple[int, Mapping[str, torch.Tensor]]]:
    """`ExpertSource` of a module that holds the weights of its experts."""
    weights = {name: getattr(module, name) for name in parameter_names(module)}
    for expert in experts:
        yield expert, {name: weight[expert] for name, weight in weights.items()}


def _run(experts: Any, own: Mapping[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Return the output of one expert for rows [n, H]."""
    with torch._C._EnableTorchFunction():  # re-enable function modes for functions that families call
        inner = _linear(experts, "gate_up_proj" if experts.has_gate else "up_proj", own, rows)
        inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
        out = _linear(experts, "down_proj", own, inner)
        norm = getattr(experts, "post_expert_norm", None)
        if norm is None:
            return out
        weight = next(norm.parameters(), out)  # the norm is part of the layer and on its device
        normed: torch.Tensor = norm(out.to(weight.device))
        return normed.to(out.device)


def _linear(experts: Any, name: str, own: Mapping[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    weight, bias = own[name], own.get(name + "_bias")
    weight = weight.mT if experts.is_transposed else weight
    if getattr(experts, "row_products", False) and weight.device.type == "cpu":
        return row_linear(rows, weight, bias)
    return F.linear(rows, weight, bias)
