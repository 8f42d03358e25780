"""With the triton backend `row_linear` computes all products: layers, routers, experts and head."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.pytorch_utils import Conv1D

from offspec.model import row_independence
from offspec.model.attention import TreeContext
from offspec.model.experts import run_experts
from offspec.model.row_counts import RowCounts
from offspec.model.row_independence import (
    RowIndependentFunctions,
    RowProducts,
    has_row_blocks,
    use_row_products,
)
from offspec_kernels.row_linear import row_linear
from tests.support.tiny_models import load_all, open_model, write_model

TOKENS = torch.tensor([5, 17, 40])


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "gpt_oss"])
def test_a_pass(tmp_path: Path, family: str) -> None:
    model = open_model(write_model(tmp_path / "model", family))
    load_all(model, 32)
    context = TreeContext.chain(len(TOKENS), torch.device("cpu"))
    with torch.no_grad():
        expected = model.tree_model.logits(model.tree_model.hidden(TOKENS, context))
        model.tree_model.cache.rewind(0)
        model.tree_model.mode = RowProducts("triton")
        got = model.tree_model.logits(model.tree_model.hidden(TOKENS, context))
    model.close()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_which_products(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight = torch.randn(1, 3, 8), torch.randn(8, 5)
    seen, module = list[tuple[int, ...]](), torch.nn.Linear(8, 5, bias=False)
    products: dict[str, Callable[[], torch.Tensor]] = {
        "linear": lambda: F.linear(rows, weight.mT),
        "module": lambda: module(rows),
        "matmul": lambda: torch.matmul(rows, weight),
        "@": lambda: rows @ weight,
        "addmm": lambda: torch.addmm(torch.zeros(5), rows[0], weight),
    }

    def noted(rows: torch.Tensor, weight: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        seen.append(tuple(weight.shape))
        return row_linear(rows, weight, *rest, **more)

    monkeypatch.setattr(row_independence, "row_linear", noted)
    for name, product in products.items():
        with torch.no_grad():
            expected = product()
            with RowProducts("triton"):
                got = product()
        assert seen == [(5, 8)], name
        seen.clear()
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("kind", ["linear", "conv1d", "experts", "transposed experts", "router"])
def test_the_bits_of_a_row_on_a_cpu(kind: str) -> None:
    """At a size at which torch's own product on a matrix unit has rows that depend on their number."""
    if not has_row_blocks(torch.device("cpu"), torch.bfloat16):
        pytest.skip("this processor has no product of blocks")
    rows = torch.randn(70, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = (torch.randn(1024, 4096, generator=torch.Generator().manual_seed(1)) / 64).bfloat16()
    run = _products_of(kind, weight)
    with torch.no_grad():
        many = run(rows)
        if "experts" not in kind:
            assert torch.equal(many, row_linear(rows, weight))
        for count in (1, 2, 16, 65):
            assert torch.equal(run(rows[:count]), many[:count])


def _products_of(kind: str, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    module: Any
    if kind == "router":
        mode = RowIndependentFunctions(RowCounts(), row_blocks=True)

        def route(rows: torch.Tensor) -> torch.Tensor:
            with mode:
                return F.linear(rows, weight)

        return route
    if kind.endswith("experts"):
        turned = kind.startswith("transposed")
        module = torch.nn.Module()
        module.is_transposed, module.has_gate, module.has_bias = turned, False, False
        module.has_post_expert_norm, module.num_experts, module.act_fn = False, 1, torch.nn.Identity()
        back = weight if turned else weight.mT.contiguous()
        module.up_proj = (weight.mT.contiguous() if turned else weight)[None]
        module.down_proj = back[None]
        use_row_products(module)

        def respond(rows: torch.Tensor) -> torch.Tensor:
            chosen = torch.zeros(len(rows), 1, dtype=torch.long)
            return run_experts(module, rows, chosen, torch.ones(len(rows), 1).bfloat16())

        return respond
    if kind == "conv1d":
        module = Conv1D(*weight.shape).bfloat16()
        module.weight.data = weight.mT.contiguous()
        module.bias.data.zero_()
    else:
        module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False).bfloat16()
        module.weight.data = weight
    use_row_products(module)
    return lambda rows: module(rows)
