"""A rounded model as a checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.lib import quantised_draft as rounded
from tests.support.tiny_models import write_model


def test_rounded_folder_changes_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(rounded, "fingerprint", lambda checkpoint: checkpoint.name)
    one, two = (rounded.default_folder("demo", SimpleNamespace(name=name)) for name in ("a", "b"))
    assert one != two
    assert one.is_relative_to(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_rounded_checkpoint_holds_the_draft_s_own_weights(tied: bool, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    # Rows of 64, so that a group of the rounding is a row.
    source = write_model(
        tmp_path / "small", hidden_size=64, intermediate_size=64, head_dim=16, tie_word_embeddings=tied
    )
    out = rounded.ensure(str(source), tmp_path / "rounded")
    found: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    plain: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    for (name, is_now), (_, was) in zip(found.named_parameters(), plain.named_parameters(), strict=True):
        if ".layers." in name and was.dim() == 2:
            assert all(len(set(row.tolist())) <= 16 for row in is_now), name
            assert not torch.equal(is_now, was)
            assert (is_now - was).abs().mean() < 0.15 * was.abs().mean()
        else:
            assert torch.equal(is_now, was), name
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    made = (out / "model.safetensors").stat().st_mtime_ns
    assert rounded.ensure(str(source), out) == out
    assert (out / "model.safetensors").stat().st_mtime_ns == made
