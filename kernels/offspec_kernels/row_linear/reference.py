"""The product in float64, rounded as the others round."""

from torch import Tensor


def row_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = (rows.double() @ weight.double().T).to(rows.dtype)
    return out if bias is None else (out.double() + bias.double()).to(rows.dtype)
