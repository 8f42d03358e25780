"""Keys and values in 8 bits: what they are rounded to. What attention makes of them: test_tree_attention."""

import pytest
import torch

from offspec_kernels.quantized_rows import QuantizedRows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_each_row_is_rounded_by_itself(dtype: torch.dtype) -> None:
    """To the nearest of 255 numbers, in float64 and a row at a time."""
    rows = torch.randn(2, 40, 24, generator=torch.Generator().manual_seed(0))
    rows *= torch.logspace(-2, 2, 40)[:, None]
    rows[0, 3], rows[1, 5, 1:] = 0, 0
    rows = rows.to(dtype)
    found = QuantizedRows.of(rows)
    for head in range(2):
        for place, row in enumerate(rows[head].double()):
            scale = float(found.scales[head, place])
            assert scale == pytest.approx(float(row.abs().max()) / 127, rel=1e-6)
            error = (found.codes[head, place].double() * scale - row).abs().max()
            assert float(error) <= scale * 0.5001
            alone = QuantizedRows.of(rows[head, place : place + 1])
            assert torch.equal(alone.codes[0], found.codes[head, place]) and alone.scales[0] == scale
    assert found.values().dtype == dtype and torch.equal(found[0, 3:9].values(), found.values()[0, 3:9])
    if dtype == torch.float32:  # what has been rounded is not rounded again
        assert torch.equal(QuantizedRows.of(found.values()).codes, found.codes)
