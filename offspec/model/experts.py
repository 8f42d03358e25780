"""Experts of a layer, each over the rows routed to it, registered with transformers as "offspec_rows".

How many rows an expert has depends on the other rows of a pass, and the rounding of a product on how many
rows it has. So each expert's rows are filled up to a row count at which rows are independent of each other,
and what a row's experts say is summed up in the order in which its router named them.

Letters: T rows of a pass, k experts of a row, E experts of a layer, n rows of an expert, H hidden size.
"""

from typing import Any

import torch
import torch.nn.functional as F

from offspec.model.row_counts import RowCounts

NAME = "offspec_rows"


def set_row_counts(model: torch.nn.Module, counts: RowCounts) -> None:
    """Have all experts of `model` run at such row counts. Without it they run at whatever comes."""
    for module in model.modules():
        if hasattr(module, "is_transposed"):  # what transformers notes on modules that come here
            module.row_counts = counts  # type: ignore[assignment]


def run_experts(
    experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """[T, H] to [T, H].

    Args:
        experts: A module with the weights of all experts, as transformers lays them out.
        hidden: [T, H].
        chosen: [T, k], which experts each row goes to; E or more: none.
        weights: [T, k], of what they say.
    """
    counts: RowCounts = getattr(experts, "row_counts", None) or RowCounts()
    rows, of_each = chosen.shape
    said = hidden.new_zeros(rows * of_each, hidden.shape[1])
    order = chosen.flatten().argsort(stable=True)
    routed = torch.bincount(chosen.flatten(), minlength=experts.num_experts).tolist()
    start = 0
    for expert, count in enumerate(routed[: experts.num_experts]):
        if count:
            pairs = order[start : start + count]
            places = torch.arange(counts.padded(count), device=hidden.device).clamp_(max=count - 1)
            said[pairs] = _run(experts, expert, hidden[pairs[places] // of_each])[:count]
            start += count
    parts = (said.view(rows, of_each, -1) * weights[..., None]).float().unbind(1)
    total = parts[0]
    for part in parts[1:]:  # a sum over a dimension adds in an order that depends on the shape
        total = total + part
    return total.to(hidden.dtype)


def _run(experts: Any, expert: int, rows: torch.Tensor) -> torch.Tensor:
    """What one expert says of rows [n, H]."""
    inner = _linear(experts, "gate_up_proj" if experts.has_gate else "up_proj", expert, rows)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    out = _linear(experts, "down_proj", expert, inner)
    return experts.post_expert_norm(out) if experts.has_post_expert_norm else out


def _linear(experts: Any, name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
    weight = getattr(experts, name)[expert]
    bias = getattr(experts, name + "_bias")[expert] if experts.has_bias else None
    return F.linear(rows, weight.mT if experts.is_transposed else weight, bias)


def register() -> None:
    """Make it known to transformers (again and again is harmless)."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, run_experts)
