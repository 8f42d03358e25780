"""Drafting with resident layers: equal to a naive run of them alone, without effects on the target."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache

from offspec import SamplingParams
from offspec.core.errors import DraftError
from offspec.core.events import Notice
from offspec.draft.early_exit import EarlyExitDrafter
from offspec.model.attention import TreeContext
from offspec.model.cache import TreeCache
from offspec.model.loaded import LoadedModel
from offspec.model.probe.small_config import small_config
from offspec_planners.placement import Placement, Tier
from tests.support.drafter_logits import CALLS, CHAINS, node_logits, paths
from tests.support.exhaustive import sampled_params
from tests.support.packed_models import packed_checkpoint, to_grouped
from tests.support.tiny_models import FAMILIES as DENSE
from tests.support.tiny_models import (
    HYBRIDS,
    nothing,
    open_model,
    tiny_engine,
    write_config,
    write_hybrid,
    write_model,
)

IDS = [5, 9, 17, 33, 64, 20, 21, 22, 9]
USED = (0, 2)
CPU = torch.device("cpu")
FAMILIES = ["llama", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "mixtral", "opt"]


def load(folder: Path, resident: Sequence[int] = USED, device: torch.device = CPU) -> LoadedModel:
    target = open_model(folder, device=device)
    placement = Placement.in_memory(len(target.layers), resident, 1)
    target.load(replace(placement, staging=0 if device == CPU else 2), 64, nothing)
    return target


def naive_model(folder: Path, used: Sequence[int] = USED) -> Any:
    """Return transformers' own model, whose other layers are skipped while `skips` is set."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.skips = True
    stack = next(m for m in model.get_decoder().children() if isinstance(m, torch.nn.ModuleList))
    for index, layer in enumerate(stack):
        if index not in used:
            layer.forward = _skipping(model, layer.forward)
    return model


def _skipping(model: Any, forward: Any) -> Any:
    return lambda hidden, *args, **kwargs: hidden if model.skips else forward(hidden, *args, **kwargs)


@torch.no_grad()
def naive(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Return logits [7, V] at the nodes of the tree below the last of the ids, each path separately."""
    return torch.stack([model(torch.tensor([[*ids, *path]])).logits[0, -1] for path in paths()])


@torch.no_grad()
def naive_after_all_layers(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Return the same logits after a prefix that all layers have processed."""
    rows = []
    for path in paths():
        cache = DynamicCache(config=model.config)
        model.skips = False
        model(torch.tensor([ids[:-1]]), past_key_values=cache, use_cache=True)
        model.skips = True
        tokens = torch.tensor([[ids[-1], *path]])
        # One by one: the cache lengths of skipped layers lag.
        for position, token in enumerate(tokens[0], len(ids) - 1):
            out = model(
                token[None, None],
                past_key_values=cache,
                use_cache=True,
                position_ids=torch.tensor([[position]]),
            )
        rows.append(out.logits[0, -1])
    return torch.stack(rows)


@torch.no_grad()
def run_target(target: LoadedModel, ids: Sequence[int], commit: bool = False) -> torch.Tensor:
    """Return final states of the ids after the target's cache, which are committed or dropped."""
    model, start = target.tree_model, target.tree_model.cache.length
    context = TreeContext(
        start, torch.arange(start, len(ids)), len(ids) - start, torch.zeros(0, 0, dtype=torch.bool)
    )
    states = model.hidden(torch.tensor(ids[start:]), context)
    if commit:
        model.cache.commit(len(ids) - start, [])
    else:
        model.cache.rewind(start)
    return states


@pytest.mark.parametrize(
    ("family", "device"),
    [*((family, "cpu") for family in FAMILIES), pytest.param("mixtral", "cuda", marks=pytest.mark.gpu)],
    indirect=["device"],
)
def test_logits_equal_those_of_the_resident_layers(family: str, device: torch.device, tmp_path: Path) -> None:
    """Layer 1 of 3 streams. Positions, windows and caps match the layers' indices."""
    target = load(write_model(tmp_path / "model", family), device=device)
    drafter = EarlyExitDrafter(target, 64)
    model = naive_model(tmp_path / "model")
    assert drafter.name == "early-exit (2 of 3 layers)" and not drafter.required_states
    longer, other = [*IDS, 7, 41, 70], [*IDS[:4], 50, 51, 52]
    expected = [naive(model, ids) for ids in (IDS, longer, other)]
    for calls in (CALLS, CHAINS):
        torch.testing.assert_close(node_logits(drafter, IDS, calls), expected[0], rtol=1e-4, atol=1e-4)
        drafter.commit([0, 1, 3])
        torch.testing.assert_close(node_logits(drafter, longer, calls), expected[1], rtol=1e-4, atol=1e-4)
        drafter.rewind(4)
        torch.testing.assert_close(node_logits(drafter, other, calls), expected[2], rtol=1e-4, atol=1e-4)
        drafter.rewind(0)
    drafter.close()
    target.close()


# Families with special attention, and settings that make small models of them.
OWN: dict[str, dict[str, Any]] = {
    "falcon": {"alibi": True, "new_decoder_architecture": False},
    "bloom": {},
    "gptj": {},
    "mpt": {},
}
# Layers that return tuples, share keys, or get masks by the length of the first layer's cache.
UNUSUAL = ("bamba", "gemma3n_text", "falcon", "bloom")


@pytest.mark.usefixtures("drafters_stay")
@pytest.mark.parametrize(
    ("family", "first"),
    sampled_params(
        [(family, first) for family in UNUSUAL for first in (False, True)],
        ("bamba", False),
        ("gemma3n_text", True),
        ("bloom", True),
    )
    + [
        pytest.param(family, place % 2 == 0, marks=pytest.mark.exhaustive)
        for place, family in enumerate([*list(DENSE)[::3], *HYBRIDS, *OWN])
        if family not in UNUSUAL
    ],
)
def test_drafting_for_families_of_every_kind(family: str, first: bool, tmp_path: Path) -> None:
    """Whether or not the first layer is resident, no draft step fails, and output is the target's."""
    folder, heard = tmp_path / "model", list[object]()
    if family in HYBRIDS:
        write_hybrid(folder, family)
    elif family in DENSE:
        write_model(folder, family)
    else:
        write_config(folder, small_config(CONFIG_MAPPING[family](**OWN[family])))
    count, sampling = len(open_model(folder).layers), SamplingParams(max_tokens=6, ignore_eos=True)
    stay = [0, *range(2, count)] if first else [*range(1, count)]
    with tiny_engine(folder, "none", budget=1) as engine:
        alone = engine.generate(IDS, sampling).token_ids
    with tiny_engine(
        folder,
        "none",
        resident=stay,
        more=lambda target: {"early-exit": EarlyExitDrafter(target, 64)},
        notify=heard.append,
    ) as engine:
        assert engine.generate(IDS, sampling).token_ids == alone
    assert not [event.text for event in heard if isinstance(event, Notice)]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_committed_keys_of_the_target_are_shared(family: str, tmp_path: Path) -> None:
    target = load(write_model(tmp_path / "model", family))
    drafter = EarlyExitDrafter(target, 16)
    model = naive_model(tmp_path / "model")
    node_logits(drafter, IDS[:5])
    drafter.commit([0])
    run_target(target, IDS[:-1], commit=True)
    drafter.adopt_target_cache()
    torch.testing.assert_close(
        node_logits(drafter, IDS), naive_after_all_layers(model, IDS), rtol=1e-4, atol=1e-4
    )
    mine = drafter._model.cache
    assert isinstance(mine, TreeCache)
    for index, (kept, its) in enumerate(
        zip(mine.committed(0), target.tree_model.cache.committed(0), strict=True)
    ):
        assert (kept is not None) == (index in USED), "skipped layers take no memory"
        if kept is not None and its is not None:
            assert torch.equal(kept[0], its[0]) and torch.equal(kept[1], its[1])
    target.tree_model.cache.rewind(6)
    drafter.rewind(6)
    other = [*IDS[:6], 60, 61]
    run_target(target, other[:-1], commit=True)
    drafter.adopt_target_cache()
    torch.testing.assert_close(
        node_logits(drafter, other), naive_after_all_layers(model, other), rtol=1e-4, atol=1e-4
    )
    drafter.close()
    target.close()


def test_interrupt_between_layers_leaves_both_usable(tmp_path: Path) -> None:
    target = load(write_model(tmp_path / "model"))
    drafter = EarlyExitDrafter(target, 64)
    heard: list[int] = []
    target.tree_model.on_layer = heard.append
    before = node_logits(drafter, IDS)
    assert not heard, "no progress is reported while a tree grows"
    expected = run_target(target, IDS)
    assert heard == [1, 2, 3]

    def stop() -> None:
        raise KeyboardInterrupt

    drafter.set_cancel_check(stop)
    with pytest.raises(KeyboardInterrupt):
        node_logits(drafter, IDS)
    drafter.set_cancel_check(None)
    assert torch.equal(node_logits(drafter, IDS), before)
    assert torch.equal(run_target(target, IDS), expected)
    target.close()


def test_packed_layers_are_dequantized_when_they_run(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", hidden_size=64, intermediate_size=64, head_dim=16)
    checkpoint, dense = packed_checkpoint(source, tmp_path / "packed", to_grouped(4))
    target = LoadedModel(checkpoint.folder, checkpoint.tensors, torch.float32, torch.device("cpu"))
    target.load(Placement.in_memory(3, USED, 1), 64, nothing)
    assert target.is_packed
    drafter = EarlyExitDrafter(target, 64)
    expected = run_target(target, IDS)
    torch.testing.assert_close(
        node_logits(drafter, IDS), naive(naive_model(dense), IDS), rtol=1e-4, atol=1e-4
    )
    assert torch.equal(run_target(target, IDS), expected)
    drafter.close()
    target.close()


def test_half_of_the_layers_if_all_are_resident(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", num_hidden_layers=5)
    target = load(folder, range(5))
    drafter = EarlyExitDrafter(target, 64)
    assert drafter.name == "early-exit (2 of 5 layers)"
    before = node_logits(drafter, IDS)
    torch.testing.assert_close(before, naive(naive_model(folder, (0, 1)), IDS), rtol=1e-4, atol=1e-4)
    run_target(target, IDS[:-1], commit=True)
    drafter.adopt_target_cache()
    torch.testing.assert_close(node_logits(drafter, IDS), before, rtol=1e-4, atol=1e-4)
    target.close()


def test_no_resident_layers(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    target = load(folder, ())
    with pytest.raises(DraftError, match="none fits: give more memory"):
        EarlyExitDrafter(target, 64)
    target.close()
    target = open_model(folder)
    target.load(Placement((Tier.DEVICE, Tier.DISK, Tier.DISK), 2, 0, Tier.DISK), 64, nothing)
    with pytest.raises(DraftError, match="the target's head, which does not fit"):
        EarlyExitDrafter(target, 64)
    target.close()
