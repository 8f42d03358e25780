"""Families of which several layers are one in part, and families whose layers return more than states."""

from pathlib import Path
from typing import Any

from tests.support.tiny_models import load_all, open_model, write_hybrid


def test_layers_that_share_parameters_each_read_them(tmp_path: Path) -> None:
    """A checkpoint has them once; a slot of either layer needs them all."""
    model = open_model(write_hybrid(tmp_path, "zamba2"))
    layers: list[Any] = list(model.skeleton.layers)
    shares = [index for index, layer in enumerate(layers) if hasattr(layer, "shared_transformer")]
    first, second = (model.layer_bytes[index] for index in shares)
    assert abs(first - second) < first / 10
    load_all(model, 16)
    one, other = (list(layers[index].shared_transformer.parameters()) for index in shares)
    assert one and not any(part.is_meta for part in one + other)
    assert all(a.equal(b) for a, b in zip(one, other, strict=True))
    model.close()


def test_layers_that_return_tuples_are_measured(tmp_path: Path) -> None:
    model = open_model(write_hybrid(tmp_path, "bamba"))
    attends = [kind == "full_attention" for kind in model.skeleton.config.layers_block_type]
    assert any(attends) and [bool(kept) for kept in model.skeleton.rows.kept] == attends
    assert model.skeleton.rows.state_numbers
    model.close()
