"""MTP modules in their published layouts: equal to a naive run of every path, without a cache."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from offspec.checkpoint import open_checkpoint
from offspec.checkpoint.tensors import PackedInfo
from offspec.core.errors import DraftError
from offspec.draft.base import Drafter, Features, RequiredStates
from offspec.draft.heads.base import OpenedHead, TargetShape
from offspec.draft.heads.mtp import LAYOUTS, open_mtp
from offspec.model.attention import TreeContext
from offspec.model.loaded import LoadedModel
from offspec.model.parts import TargetParts
from tests.support.drafter_logits import CALLS, CHAINS, node_logits
from tests.support.mtp_files import CASES, LAYERS, ReferenceMtp, write_with_mtp
from tests.support.packed_models import packed_checkpoint, to_grouped
from tests.support.tiny_models import load_all, open_model, write_model

IDS = [5, 9, 17, 33, 64, 20, 21, 22, 9]
CPU = torch.device("cpu")


def shape_of(target: LoadedModel) -> TargetShape:
    return TargetShape(
        "model",
        target.skeleton.config.hidden_size,
        target.skeleton.vocab_size,
        len(target.layers),
        target.dtype,
        target.device,
        target.skeleton.config,
    )


@torch.no_grad()
def run(target: LoadedModel, ids: Sequence[int]) -> torch.Tensor:
    """Return its final states [n, H]; its cache is left empty."""
    context = TreeContext.chain(len(ids), target.device)
    states = target.tree_model.hidden(torch.tensor(ids, device=target.device), context)
    target.tree_model.cache.rewind(0)
    return states


def opened(folder: Path, device: torch.device = CPU) -> tuple[OpenedHead, LoadedModel]:
    target = open_model(folder, device=device)
    load_all(target, 64)
    run(target, IDS)  # as always before states are available
    head = open_mtp(open_checkpoint(str(folder)), shape_of(target))
    assert head is not None
    return head, target


def observe(drafter: Drafter, states: torch.Tensor, start: int) -> None:
    drafter.observe(Features(start, states[start:], {}))


@pytest.mark.parametrize(
    ("layout", "family", "overrides", "device"),
    [
        *(pytest.param(*case, "cpu", id=f"{case[0]}-{case[1]}") for case in CASES),
        pytest.param(*CASES[1], "cuda", marks=pytest.mark.gpu, id="experts-cuda"),
    ],
    indirect=["device"],
)
def test_predictions_follow_the_published_formulas(
    layout: str, family: str, overrides: dict[str, Any], device: torch.device, tmp_path: Path
) -> None:
    folder = write_with_mtp(tmp_path / "model", layout, family, overrides)
    head, target = opened(folder, device)
    assert (head.kind, head.required_states, head.shares_head) == ("mtp", RequiredStates(last=True), True)
    naive, drafter = ReferenceMtp(folder, layout), head.load(TargetParts(target), 16)
    assert len(target.layers) == LAYERS, "the module behind its layers is none of them"
    longer, other = [*IDS, 7, 41, 70], [*IDS[:4], 50, 51, 52]
    with torch.no_grad():
        torch.testing.assert_close(run(target, IDS).cpu(), naive.features(IDS), rtol=1e-4, atol=1e-4)
        known = {len(ids): (naive.features(ids[:-1]).to(device), naive(ids)) for ids in (IDS, longer, other)}
        for calls in (CALLS, CHAINS):
            for ids, start in ((IDS, 0), (longer, len(IDS) - 1), (other, 4)):
                states, expected = known[len(ids)]
                observe(drafter, states, start)
                torch.testing.assert_close(node_logits(drafter, ids, calls), expected, rtol=1e-4, atol=1e-4)
                if ids is IDS:
                    drafter.commit([0, 1, 3])
                else:
                    drafter.rewind(4 if ids is longer else 0)
    drafter.close()
    target.close()


def test_packed_module_is_dequantized_when_loaded(tmp_path: Path) -> None:
    """With a packed target, as in a checkpoint quantized as a whole."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    source = write_with_mtp(tmp_path / "model", "deepseek", "llama", sizes)
    packed, dense = packed_checkpoint(source, tmp_path / "packed", to_grouped(4))
    said = []
    for checkpoint in (packed, open_checkpoint(str(dense))):
        target = LoadedModel(checkpoint.folder, checkpoint.tensors, torch.float32, torch.device("cpu"))
        load_all(target, 64)
        states = run(target, IDS[:-1])
        head = open_mtp(checkpoint, shape_of(target))
        assert head is not None
        tensors = LAYOUTS[0].tensors(checkpoint.tensors, len(target.layers))
        assert any(isinstance(weight, PackedInfo) for weight in tensors.values()) == target.is_packed
        drafter = head.load(TargetParts(target), 16)
        observe(drafter, states, 0)
        said.append(node_logits(drafter, IDS))
        drafter.close()
        target.close()
    torch.testing.assert_close(*said, rtol=1e-4, atol=1e-4)


def test_memory_is_known_before_loading(tmp_path: Path) -> None:
    folder = write_with_mtp(tmp_path / "model", "mimo", "qwen2", {})
    head, target = opened(folder)
    size = sum(
        tensor.numel() * 4
        for name, tensor in load_file(folder / "model.safetensors").items()
        if "mtp_layers" in name
    )
    kv, state = 2 * 2 * 8 * 4, 32 * 4  # per position: keys and values of two heads of 8, and a state
    assert head.nbytes(10) - head.nbytes(0) == 10 * (kv + state)
    assert size <= head.nbytes(0) < size + 2 * 4096 + 4096
    ordinary = write_model(tmp_path / "ordinary")
    assert open_mtp(open_checkpoint(str(ordinary)), shape_of(target)) is None
    target.close()


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("mlp.up_proj", None, "lacks layers.0.mlp.up_proj"),
        ("input_proj", torch.zeros(32, 32), "has shape"),
    ],
    ids=["a part is missing", "of another shape"],
)
def test_unsupported_modules_are_refused_in_one_line(
    name: str, tensor: torch.Tensor | None, reason: str, tmp_path: Path
) -> None:
    folder = write_with_mtp(tmp_path / "model", "mimo", "qwen2", {})
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.mtp_layers.0.{name}.weight"]
    if tensor is not None:
        tensors[f"model.mtp_layers.0.{name}.weight"] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    target = open_model(folder)
    with pytest.raises(DraftError, match=reason) as caught:
        open_mtp(open_checkpoint(str(folder)), shape_of(target))
    assert "the MTP module of model cannot be run" in str(caught.value) and "\n" not in str(caught.value)
    target.close()
