"""The upcycled model says what the dense one says; its experts differ in bytes, and are chosen as wished."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bench.lib.cgroup import BenchError
from bench.lib.routers import chosen_shares, make_router, mlp_inputs, wanted_shares
from bench.lib.upcycle import RECIPE, ensure, read_recipe, upcycle
from bench.lib.upcycling import Mixture, expert_files
from offspec.checkpoint import open_checkpoint
from offspec.checkpoint.widening import dense
from offspec.core.errors import UnsupportedModelError
from tests.support.bench_models import load_model, logits, make_model

TEXTS = [[(7 * i + 13 * text * i * i) % 58 + 3 for i in range(60)] for text in range(8)]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    make_model(folder)
    return folder


@pytest.mark.parametrize(
    "mixture",
    [Mixture(4, 1), Mixture(6, 2, skew=1), Mixture(8, 4, factor=2), Mixture(3, 3, factor=2)],
    ids=lambda mixture: mixture.name,
)
def test_same_logits(small: Path, tmp_path: Path, mixture: Mixture) -> None:
    upcycle(open_checkpoint(str(small)), tmp_path / "mixture", mixture, TEXTS)
    model = load_model(tmp_path / "mixture")
    assert model.config.model_type == "mixtral"
    routed: dict[int, set[int]] = {}
    for number, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_hook(
            lambda module, args, out, number=number: routed.setdefault(number, set()).update(
                out[2].flatten().tolist()
            )
        )
    expected = logits(load_model(small))
    assert expected.std() > 0.3  # far above the tolerance
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    assert routed == {number: set(range(mixture.experts)) for number in range(2)}


def test_a_mistral_s_window_is_kept(tmp_path: Path) -> None:
    model = make_model(tmp_path / "small", "mistral", sliding_window=5)
    upcycle(open_checkpoint(str(tmp_path / "small")), tmp_path / "mixture", Mixture(4, 2), TEXTS)
    torch.testing.assert_close(logits(load_model(tmp_path / "mixture")), logits(model), rtol=1e-4, atol=1e-4)


def test_experts_are_pieces_of_their_own(small: Path, tmp_path: Path) -> None:
    mixture = Mixture(5, 2)
    upcycle(open_checkpoint(str(small)), tmp_path / "mixture", mixture, TEXTS)
    recipe = read_recipe(tmp_path / "mixture")
    found = dense(open_checkpoint(str(tmp_path / "mixture")))
    seen = set()
    for layer in range(2):
        end = None
        for expert in range(5):
            prefix = f"model.layers.{layer}.block_sparse_moe.experts.{expert}."
            parts = [found[f"{prefix}{name}.weight"] for name in ("w1", "w3", "w2")]
            assert sum(part.nbytes for part in parts) == recipe["expert_bytes"]
            for part in parts:
                assert end is None or part.offset == end
                end = part.offset + part.nbytes
                seen.add(part.file.read_bytes()[part.offset : end])
        assert found[f"model.layers.{layer}.block_sparse_moe.experts.0.w1.weight"].offset % 4096 == 0
    assert len(seen) == 2 * 5 * 3  # no two matrices have the same bytes
    assert recipe["experts_bytes"] == 2 * 5 * recipe["expert_bytes"] == 2 * 5 * 3 * 24 * 40 * 4
    files = [load_file(file) for file in sorted((tmp_path / "mixture").glob("*.safetensors"))]
    total = sum(tensor.nbytes for file in files for tensor in file.values())
    index = json.loads((tmp_path / "mixture" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == recipe["total_bytes"] == total
    assert sum(recipe["shares"]) == pytest.approx(1, abs=1e-3)


def test_wanted_shares() -> None:
    torch.testing.assert_close(wanted_shares(8, 2, 0.0), torch.full((8,), 0.25))
    skewed = wanted_shares(8, 2, 1.0)
    torch.testing.assert_close(skewed / skewed[0], 1 / torch.arange(1.0, 9.0))
    steep = wanted_shares(8, 4, 2.0)
    assert float(steep.sum()) == pytest.approx(4) and float(steep.max()) == 1
    assert all(a >= b for a, b in itertools.pairwise(steep))
    torch.testing.assert_close(wanted_shares(3, 3, 1.0), torch.ones(3))


@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_experts_are_chosen_as_often_as_is_wished(small: Path, skew: float) -> None:
    for layer, hidden in enumerate(mlp_inputs(small, TEXTS)):
        assert hidden.shape == (sum(len(text) - 1 for text in TEXTS), 24)
        router = make_router(hidden, 8, 2, skew, layer)
        shares = chosen_shares(hidden @ router.T, 2).sort(descending=True).values
        torch.testing.assert_close(shares, wanted_shares(8, 2, skew), atol=0.03, rtol=0)


def test_ensure_builds_once_and_knows_its_source(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.lib.upcycle.calibration_texts", lambda folder: TEXTS)
    out = tmp_path / "mixture"
    assert ensure(str(small), out, Mixture(4, 2)) == (out, True)
    assert ensure(str(small), out, Mixture(4, 2)) == (out, False)
    with pytest.raises(BenchError, match="--force"):
        ensure(str(small), out, Mixture(4, 1))
    assert ensure(str(small), out, Mixture(4, 1), force=True) == (out, True)
    (out / RECIPE).write_text("{}")
    with pytest.raises(BenchError, match="was not made by"):
        ensure(str(small), out, Mixture(4, 1))


def test_what_cannot_be_made_is_refused(small: Path, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="5 of 4"):
        Mixture(4, 5)
    with pytest.raises(BenchError, match="skew"):
        Mixture(4, 2, skew=-1)
    make_model(tmp_path / "qwen3", "qwen3")
    with pytest.raises(UnsupportedModelError, match="qwen3"):
        expert_files(open_checkpoint(str(tmp_path / "qwen3")), Mixture(4, 2))
    make_model(tmp_path / "biased", mlp_bias=True)
    with pytest.raises(UnsupportedModelError, match="bias"):
        expert_files(open_checkpoint(str(tmp_path / "biased")), Mixture(4, 2))
