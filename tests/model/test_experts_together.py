"""Experts that a GPU runs together: when it may, and that they say what each says by itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from offspec.model import experts
from offspec.model.experts import run_experts
from offspec_kernels.row_linear import grouped_linear

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
EXPERTS, HIDDEN, INNER = 8, 16, 32


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """Run experts on the device, compare with the CPU, and return whether they ran together."""
    products = list[int]()

    def noted(rows: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        products.append(len(rows))
        return grouped_linear(rows, *args, **kwargs)

    def run(module: Any, rows: int, chosen: int) -> bool:
        products.clear()
        drawn = torch.Generator().manual_seed(rows)
        hidden = torch.randint(-3, 4, (rows, HIDDEN), generator=drawn).float()
        names = torch.rand(rows, EXPERTS, generator=drawn).argsort()[:, :chosen]
        weights = torch.randint(1, 4, (rows, chosen), generator=drawn).float()
        with torch.no_grad():
            said = run_experts(module, *(of.to(CUDA) for of in (hidden, names, weights))).cpu()
        expected = (
            _alone(module, hidden).gather(1, names[..., None].expand(-1, -1, HIDDEN)) * weights[..., None]
        ).sum(1)
        torch.testing.assert_close(said, expected)
        return bool(products)

    monkeypatch.setattr(experts, "grouped_linear", noted)
    return run


def _alone(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """[T, E, H], what each expert says of each row, computed on the CPU."""
    inner = torch.einsum("th,eih->tei", hidden, module.up_proj.cpu())
    said = torch.einsum("tei,ehi->teh", inner, module.down_proj.cpu())
    norm = getattr(module, "post_expert_norm", None)
    return said if norm is None else torch.nn.functional.rms_norm(said, (HIDDEN,))


def _experts() -> Any:
    """Experts with weights that are small integers, and no gate."""
    module: Any = torch.nn.Module()
    module.is_transposed = module.has_gate = module.has_bias = False
    module.num_experts, module.act_fn = EXPERTS, torch.nn.Identity()
    drawn = torch.Generator().manual_seed(0)
    module.up_proj = torch.randint(-3, 4, (EXPERTS, INNER, HIDDEN), generator=drawn).float().to(CUDA)
    module.down_proj = torch.randint(-3, 4, (EXPERTS, HIDDEN, INNER), generator=drawn).float().to(CUDA)
    return module


def test_few_rows_run_together(together: Callable[..., bool]) -> None:
    """A plan reserves memory for one expert at a time, which all rows may ask for."""
    for rows in (1, 3, 70):
        assert together(_experts(), rows, 2)
    assert together(_experts(), 1, EXPERTS)
    assert not together(_experts(), 600, EXPERTS)
    module = _experts()
    module.post_expert_norm = torch.nn.RMSNorm(HIDDEN, device=CUDA)
    assert not together(module, 3, 2), "a norm behind each expert"
