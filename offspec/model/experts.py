"""Experts of a layer, each over the rows routed to it, registered with transformers as "offspec_rows".

How many rows an expert has depends on the other rows of a pass, and the rounding of a product on how many
rows it has. So each expert's rows are filled up to a row count at which rows are independent of each other,
and what a row's experts say is summed up in the order in which its router named them.

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
from offspec.model.torch_functions import never_watched
from offspec_kernels.backend import choose_backend
from offspec_kernels.row_linear import grouped_linear, row_linear

NAME = "offspec_rows"


# What has the weights of a module's experts where the module itself does not. It is given the experts asked
# for, how many rows go to each, and how many rows there are in all; it yields each expert in some order with
# its weights, which are there until the next.
ExpertSource = Callable[[Sequence[int], Sequence[int], int], Iterator[tuple[int, Mapping[str, torch.Tensor]]]]


@dataclass(frozen=True)
class ExpertsBeside:
    """Where experts are computed that are not where their layer is.

    All of a layer's are, whatever is in memory at the moment: processors round in different ways, and a row's
    bits would else depend on what was asked for before it.

    Args:
        device: Of the weights; rows go there, and the sums of what the experts say come back.
        mode: Entered meanwhile, in the place of that of the layer's device.
    """

    device: torch.device
    mode: AbstractContextManager[Any]


def is_experts(module: Any) -> bool:
    """Whether a module of transformers has `run_experts` compute its experts."""
    return hasattr(module, "is_transposed")  # what transformers notes on modules that come here


def parameter_names(experts: Any) -> tuple[str, ...]:
    """Names in a module of experts of all that each of them has."""
    names = ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")
    return (*names, *(f"{name}_bias" for name in names)) if experts.has_bias else names


def set_row_counts(model: torch.nn.Module, counts: RowCounts) -> None:
    """Have all experts of `model` run at such row counts. Without it they run at whatever comes."""
    for module in model.modules():
        if is_experts(module):
            module.row_counts = counts  # type: ignore[assignment]


@never_watched
def run_experts(
    experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """[T, H] to [T, H].

    Args:
        experts: A module with the weights of all experts, as transformers lays them out, or with a `source`;
            with `beside` they are computed there.
        hidden: [T, H].
        chosen: [T, k], which experts each row goes to; E or more: none.
        weights: [T, k], of what they say.
    """
    beside: ExpertsBeside | None = getattr(experts, "beside", None)
    if beside is None:
        return _run_all(experts, hidden, chosen, weights)
    with beside.mode:
        said = _run_all(experts, *(tensor.to(beside.device) for tensor in (hidden, chosen, weights)))
    return said.to(hidden.device)


def _run_all(experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    rows, of_each = chosen.shape
    asked, order = chosen.flatten().sort(stable=True)  # pairs of a row and an expert, by expert
    # Where the pairs of each end. Counting them (bincount) has the host wait for a device.
    numbers = torch.arange(1, experts.num_experts + 1, dtype=asked.dtype, device=asked.device)
    ends = torch.searchsorted(asked, numbers)
    if _run_together(experts, hidden, of_each):
        said = _said_together(experts, hidden, order, of_each, ends)
    else:
        said = _said_one_by_one(experts, hidden, order, of_each, ends)
    first, *others = (said.view(rows, of_each, -1) * weights[..., None]).unbind(1)
    total = first.float()
    for part in others:  # a sum over a dimension adds in an order that depends on the shape
        total = total + part
    return total.to(hidden.dtype)


def _said_one_by_one(
    experts: Any, hidden: torch.Tensor, order: torch.Tensor, of_each: int, ends: torch.Tensor
) -> torch.Tensor:
    """[T k, H], what each pair's expert says. The host learns who is asked, to fetch them: one wait."""
    counts: RowCounts = getattr(experts, "row_counts", None) or RowCounts()
    source: ExpertSource = getattr(experts, "source", None) or partial(_own_weights, experts)
    said = hidden.new_zeros(len(order), hidden.shape[1])
    starts = [0, *ends.tolist()]
    routed = [end - start for start, end in pairwise(starts)]
    asked = [expert for expert, count in enumerate(routed) if count]
    for expert, own in source(asked, [routed[expert] for expert in asked], len(hidden)):
        start, count = starts[expert], routed[expert]
        pairs = order[start : start + count]
        places = torch.arange(counts.padded(count), device=hidden.device).clamp_(max=count - 1)
        said[pairs] = _run(experts, own, hidden[pairs[places] // of_each])[:count]
    return said


def _run_together(experts: Any, hidden: torch.Tensor, of_each: int) -> bool:
    """Whether all experts run in one product each way, which no host waits for, with the same bits.

    On a GPU that has the weights of all, for as many rows as need no more memory than one by one. The wait is
    a small part of what more rows take.
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


def _said_together(
    experts: Any, hidden: torch.Tensor, order: torch.Tensor, of_each: int, ends: torch.Tensor
) -> torch.Tensor:
    """[T k, H], what each pair's expert says."""
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
    """Bytes that experts allocate at most while they run.

    Args:
        rows: T.
        chosen: k.
        hidden: H.
        weights: Of one expert.
        item: Bytes of a value.
    """
    one = _one_values(rows, hidden, weights)
    return rows * ((2 * chosen + 2) * hidden * item + 8 * hidden + 40 * chosen) + one * item


def _one_values(rows: int, hidden: int, weights: int) -> int:
    """Values that one expert makes of all rows, and its weights, which a product may put in another order."""
    return (rows + STEPS[-1]) * (2 * hidden + _inner(hidden, weights)) + weights


def _inner(hidden: int, weights: int) -> int:
    """Values of a row inside an expert: gates, what they make, a copy; at least 2 of 3 matrices [I, H]."""
    return 2 * weights // hidden


def _own_weights(
    module: Any, experts: Sequence[int], counts: Sequence[int], rows: int
) -> Iterator[tuple[int, Mapping[str, torch.Tensor]]]:
    """The `ExpertSource` of a module that has the weights of its experts."""
    weights = {name: getattr(module, name) for name in parameter_names(module)}
    for expert in experts:
        yield expert, {name: weight[expert] for name, weight in weights.items()}


def _run(experts: Any, own: Mapping[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """What one expert says of rows [n, H]."""
    with torch._C._EnableTorchFunction():  # modes are asked again, for what families call themselves
        inner = _linear(experts, "gate_up_proj" if experts.has_gate else "up_proj", own, rows)
        inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
        out = _linear(experts, "down_proj", own, inner)
        norm = getattr(experts, "post_expert_norm", None)
        if norm is None:
            return out
        weight = next(norm.parameters(), out)  # the norm is a part of the layer, and where that is
        normed: torch.Tensor = norm(out.to(weight.device))
        return normed.to(out.device)


def _linear(experts: Any, name: str, own: Mapping[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    weight, bias = own[name], own.get(name + "_bias")
    weight = weight.mT if experts.is_transposed else weight
    if getattr(experts, "row_products", False) and weight.device.type == "cpu":
        return row_linear(rows, weight, bias)
    return F.linear(rows, weight, bias)
