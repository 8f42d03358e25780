"""On triton's path a pass makes all products by rows: layers, routers, experts, head, whatever the family."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from offspec.model.attention import TreeContext
from offspec.model.row_products import RowProducts
from tests.support.tiny_models import load_all, open_model, write_model

TOKENS = torch.tensor([5, 17, 40])


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gpt_oss"])
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


PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "linear": lambda rows, weight: F.linear(rows, weight.mT),
    "module": lambda rows, weight: _module(weight)(rows),
    "matmul": torch.matmul,
    "@": lambda rows, weight: rows @ weight,
    "addmm": lambda rows, weight: torch.addmm(torch.zeros(weight.shape[1]), rows[0], weight)[None],
}


@pytest.mark.parametrize("name", sorted(PRODUCTS))
def test_which_products(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight = torch.randn(1, 3, 8), torch.randn(8, 5)
    inner, seen = RowProducts._linear, list[tuple[int, ...]]()

    def linear(products: RowProducts, *given: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(given[1].shape))
        return inner(products, *given)

    monkeypatch.setattr(RowProducts, "_linear", linear)
    with torch.no_grad():
        expected = PRODUCTS[name](rows, weight)
        with RowProducts("triton"):
            got = PRODUCTS[name](rows, weight)
    assert seen == [(5, 8)]
    torch.testing.assert_close(got, expected)


def _module(weight: torch.Tensor) -> torch.nn.Linear:
    module = torch.nn.Linear(weight.shape[0], weight.shape[1], bias=False)
    module.weight.copy_(weight.mT)
    return module
