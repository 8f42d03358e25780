"""Experts of a layer, each over the rows routed to it, registered with transformers as "offspec_rows".

How many rows an expert has depends on the other rows of a pass, and the rounding of a product on how many
rows it has. So each expert's rows are filled up to a row count at which rows are independent of each other,
and what a row's experts say is summed up in the order in which its router named them.

Letters: T rows of a pass, k experts of a row, E experts of a layer, n rows of an expert, H hidden size.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from offspec.model.row_counts import STEPS, RowCounts
from offspec.model.torch_functions import never_watched, watched
from offspec_kernels.row_linear import row_linear

NAME = "offspec_rows"


class ExpertSource(Protocol):
    """What has the weights of a module's experts where the module itself does not."""

    def fetch(
        self, experts: Sequence[int], counts: Sequence[int], rows: int
    ) -> Iterator[tuple[int, Mapping[str, torch.Tensor]]]:
        """Each of the experts in some order with its weights, which are there until the next.

        counts: how many of the `rows` go to each.
        """


@dataclass(frozen=True)
class ExpertsBeside:
    """Where experts are computed that are not where their layer is.

    All of a layer's are, whatever is in memory at the moment: processors round in different ways, and a row's
    bits would else depend on what was asked for before it.

    Args:
        device: Of the weights; rows go there, and the sums of what the experts say come back.
        mode: Entered meanwhile, in the place of that of the layer's device. None: nothing.
    """

    device: torch.device
    mode: TorchFunctionMode | None

    def entered(self) -> AbstractContextManager[Any]:
        """The mode, or nothing."""
        return self.mode or nullcontext()


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
    with beside.entered():
        said = _run_all(experts, *(tensor.to(beside.device) for tensor in (hidden, chosen, weights)))
    return said.to(hidden.device)


def _run_all(experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    counts: RowCounts = getattr(experts, "row_counts", None) or RowCounts()
    source: ExpertSource = getattr(experts, "source", None) or _OwnWeights(experts)
    rows, of_each = chosen.shape
    said = hidden.new_zeros(rows * of_each, hidden.shape[1])
    order = chosen.flatten().argsort(stable=True)
    routed = torch.bincount(chosen.flatten(), minlength=experts.num_experts).tolist()[: experts.num_experts]
    starts = list(accumulate(routed, initial=0))
    asked = [expert for expert, count in enumerate(routed) if count]
    for expert, own in source.fetch(asked, [routed[expert] for expert in asked], rows):
        start, count = starts[expert], routed[expert]
        pairs = order[start : start + count]
        places = torch.arange(counts.padded(count), device=hidden.device).clamp_(max=count - 1)
        said[pairs] = _run(experts, own, hidden[pairs[places] // of_each])[:count]
    first, *others = (said.view(rows, of_each, -1) * weights[..., None]).unbind(1)
    total = first.float()
    for part in others:  # a sum over a dimension adds in an order that depends on the shape
        total = total + part
    return total.to(hidden.dtype)


def scratch_bytes(rows: int, chosen: int, hidden: int, weights: int, item: int) -> int:
    """Bytes that experts allocate at most while they run.

    Args:
        rows: T.
        chosen: k.
        hidden: H.
        weights: Of one expert.
        item: Bytes of a value.
    """
    inner = 2 * weights // hidden  # gates, what they make, and a copy: at least 2 of 3 matrices [I, H]
    one = (rows + STEPS[-1]) * (2 * hidden + inner) + weights  # which a product may put in another order
    return rows * ((2 * chosen + 2) * hidden * item + 8 * hidden + 40 * chosen) + one * item


class _OwnWeights:
    """Experts whose module has their weights."""

    def __init__(self, experts: Any) -> None:
        self._weights = {name: getattr(experts, name) for name in parameter_names(experts)}

    def fetch(
        self, experts: Sequence[int], counts: Sequence[int], rows: int
    ) -> Iterator[tuple[int, Mapping[str, torch.Tensor]]]:
        for expert in experts:
            yield expert, {name: weight[expert] for name, weight in self._weights.items()}


def _run(experts: Any, own: Mapping[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """What one expert says of rows [n, H]."""
    with watched():
        inner = _linear(experts, "gate_up_proj" if experts.has_gate else "up_proj", own, rows)
        inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
        out = _linear(experts, "down_proj", own, inner)
        norm = getattr(experts, "post_expert_norm", None)
        return out if norm is None else _normed(norm, out)


def _normed(norm: Any, out: torch.Tensor) -> torch.Tensor:
    """The norm is a part of the layer, and where that is."""
    weight = next(norm.parameters(), out)
    normed: torch.Tensor = norm(out.to(weight.device))
    return normed.to(out.device)


def _linear(experts: Any, name: str, own: Mapping[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    weight, bias = own[name], own.get(name + "_bias")
    weight = weight.mT if experts.is_transposed else weight
    if getattr(experts, "row_products", False) and weight.device.type == "cpu":
        return row_linear(rows, weight, bias)
    return F.linear(rows, weight, bias)


def register() -> None:
    """Make it known to transformers (again and again is harmless)."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, run_experts)
