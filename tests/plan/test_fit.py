"""Fit in memory: every chosen placement is also found to fit, and no other."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec import CapacityError, RequestError
from offspec.core import memory as process_memory
from offspec.core.config import Dtype, EngineConfig
from offspec.draft.forward import HEAD_ROWS
from offspec.model.fused.linear import DequantizingLinear, Int4Linear, PanelLinear
from offspec.model.fused.weights import packed_size
from offspec.plan.fit import (
    LEAST_BUDGET,
    _modes,
    cache_bytes,
    find_fit,
    max_sequences,
    min_memory,
    still_fits,
)
from offspec.plan.initial_fit import initial_fit
from offspec.plan.load import open_models
from offspec.plan.needs import WIDEST, draft_bytes
from offspec.plan.opened import OpenedModels
from offspec.sampling.noise import CACHED_ROWS
from offspec_planners.placement import Placement, Tier
from tests.support.plan_fixtures import MB, write_large
from tests.support.tensor_bytes import tensor_bytes
from tests.support.tiny_models import open_model, write_model


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., OpenedModels]]:
    """Return a function that opens models with these settings, without loading them."""
    folder = write_large(tmp_path_factory.mktemp("models") / "large")
    every = list[OpenedModels]()

    def open_with(**settings: Any) -> OpenedModels:
        config = EngineConfig(
            str(folder), **({"draft": "self", "context": 128, "budget": 64, "width": 16} | settings)
        )
        every.append(open_models(config, lambda event: None))
        return every[-1]

    yield open_with
    for found in every:
        found.close()


@pytest.mark.parametrize(
    ("draft", "context"),
    [("self", None), ("none", 128), ("itself", 128)],
)
def test_decided_arrangements_fit(
    opened: Callable[..., OpenedModels], draft: str, context: int | None
) -> None:
    found = opened(draft="none" if draft == "none" else "self", context=context)
    if draft == "itself":
        drafts = replace(found.drafts, names=(found.config.model,))
        found = replace(found, config=replace(found.config, draft=found.config.model), drafts=drafts)
    config, seen = found.config, set[Placement]()
    least, _ = min_memory(found, config)
    for memory in range(least, least + 80 * MB, 4 * MB):
        given = replace(found, memory=memory)
        decided = find_fit(given, config)
        seen.add(decided.placement)
        assert still_fits(given, config, decided)
        assert still_fits(replace(found, memory=2 * memory), config, decided), "more is no harm"
        assert not still_fits(replace(found, memory=least - MB), config, decided)
        assert not still_fits(given, replace(config, budget=10**8), decided)
    assert len(seen) > 3 and any(not placement.slots for placement in seen)
    with pytest.raises(CapacityError):
        find_fit(replace(found, memory=least - MB), config)


def test_cpu_layers_need_a_gpu(opened: Callable[..., OpenedModels]) -> None:
    with pytest.raises(RequestError, match="no NVIDIA GPU; omit `cpu_layers`, which needs a GPU"):
        opened(cpu_layers=3)
    assert find_fit(opened(cpu_layers=0), opened().config).placement.layers(Tier.CPU) == ()


def test_invalid_arrangements_do_not_fit(opened: Callable[..., OpenedModels]) -> None:
    found = replace(opened(), memory=10**12)
    decided = find_fit(found, found.config)
    assert still_fits(found, found.config, decided)
    tiers = decided.placement.tiers
    for wrong in (
        replace(decided, placement=replace(decided.placement, tiers=tiers[:-1])),
        replace(decided, placement=replace(decided.placement, tiers=(*tiers, Tier.DEVICE))),
        replace(decided, placement=replace(decided.placement, head=Tier.DISK, slots=2)),
        replace(decided, draft_mode="full"),
        replace(decided, context=found.target.skeleton.context_length + 1),
    ):
        assert not still_fits(found, found.config, wrong)


def test_self_draft_has_the_most_bits_that_fit(opened: Callable[..., OpenedModels]) -> None:
    """With more memory it goes from no draft over 2, 3 and 4 bits to unpacked values."""
    found, seen = opened(), list[tuple[str, int]]()
    least, _ = min_memory(found, found.config)
    for memory in range(least, least + 60 * MB, MB // 2):
        decided = find_fit(replace(found, memory=memory), found.config)
        seen.append((decided.draft_mode, decided.draft_bits))
    order = [("none", 16), ("packed", 2), ("packed", 3), ("packed", 4), ("expanded", 4)]
    assert list(dict.fromkeys(seen)) == order
    assert seen == sorted(seen, key=order.index)
    three = replace(found.config, draft_bits=3)
    held = [find_fit(replace(found, memory=memory), three) for memory in (least, 10**12)]
    assert [(found.draft_mode, found.draft_bits) for found in held] == [("none", 16), ("expanded", 3)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_self_draft_stays_packed_if_no_step_unpacks_it(dtype: Dtype, tmp_path: Path) -> None:
    """Its values would take memory of the target's layers, and steps would be slower: much so in float32."""
    folder = write_model(tmp_path / "model", hidden_size=64, intermediate_size=128, head_dim=16)
    config = EngineConfig(str(folder), draft="self", dtype=dtype, context=128, budget=64, width=16)
    found = open_models(config, lambda event: None)
    try:
        decided = find_fit(replace(found, memory=10**12), config)
        assert (decided.draft_mode, decided.draft_bits) == ("packed", 4)
    finally:
        found.close()


@pytest.mark.parametrize(("dtype", "sizes"), [("float32", {}), ("bfloat16", {"head_dim": 16})])
def test_bytes_of_fused_weights_are_predicted(dtype: str, sizes: dict[str, int], tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", hidden_size=64, intermediate_size=128, **sizes)
    draft = open_model(folder, getattr(torch, dtype))
    said = packed_size(draft.skeleton, 4, draft.device)
    norms = sum(w.nbytes for layer in draft.skeleton.layers for w in layer.parameters() if w.dim() == 1)
    draft.load_quantized(4, False, 64, lambda done, total: None, range(3, 40))
    lean = draft.fused_model(64)
    assert lean is not None
    fused = [of for layer in lean._layers for of in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    rounded = (PanelLinear, Int4Linear, DequantizingLinear)
    kinds = [product for product in fused if isinstance(product, rounded)]
    assert sum(map(tensor_bytes, kinds)) + norms == said.nbytes
    assert (
        any(isinstance(product, DequantizingLinear) for product in kinds) == (said.scratch > 0) == (not sizes)
    )
    config = EngineConfig(str(folder), context=128, width=16)
    packed, expanded = (draft_bytes((mode, 4), draft, config, 128) for mode in ("packed", "expanded"))
    values = sum(weight.nbytes for weight in draft.skeleton.layers.parameters())
    assert expanded - packed == values - said.nbytes - said.scratch * draft.dtype.itemsize


def test_draft_step_is_not_wider_than_its_tree(opened: Callable[..., OpenedModels]) -> None:
    found = opened(budget=None, width=None)
    wide, narrow = (
        min_memory(found, replace(found.config, budget=LEAST_BUDGET, width=width))[0]
        for width in (WIDEST, None)
    )
    assert narrow < wide - 12 * (WIDEST - LEAST_BUDGET) * found.target.skeleton.vocab_size
    least = initial_fit(replace(found, memory=narrow + MB), None, None, lambda event: None)
    assert (least.config.budget, least.config.width) == (LEAST_BUDGET, LEAST_BUDGET)
    ample = initial_fit(replace(found, memory=10**10), None, None, lambda event: None)
    assert ample.config.width == WIDEST


def test_layer_of_the_draft_is_freed_before_computation(
    opened: Callable[..., OpenedModels], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = opened()
    before = min_memory(found, found.config)
    monkeypatch.setattr("offspec.plan.needs.loading_bytes", lambda held, draft: 1000)
    assert min_memory(found, found.config) == before


def test_error_of_a_misfit_lists_the_parts(opened: Callable[..., OpenedModels]) -> None:
    found = opened(draft="none")
    listed = r"\(Python and libraries .*, head and norms .*, two layers .*\)"
    with pytest.raises(
        CapacityError, match=rf"^1 B of memory is too little: .* is \d.*; give more `memory` {listed}$"
    ):
        find_fit(replace(found, memory=1), found.config)
    with pytest.raises(
        CapacityError, match=r"^1 B of device memory is too little: .*; give more `vram` \(.*\)$"
    ) as caught:
        find_fit(replace(found, vram=1), found.config)
    assert caught.value.given == 1 < caught.value.needed


def test_a_shorter_context_is_advised_only_if_it_would_fit(
    opened: Callable[..., OpenedModels], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offspec.plan.fit._CONTEXTS", (128,))
    found = opened(draft="none", context=128)
    longer = replace(found.config, context=found.target.skeleton.context_length)
    least = min_memory(found, found.config)[0]
    assert min_memory(found, longer)[0] > least
    with pytest.raises(CapacityError, match=r"; give more `memory` or use a shorter `context` \(Python"):
        find_fit(replace(found, memory=least), longer)
    for config in (longer, replace(found.config, context=None)):
        with pytest.raises(CapacityError, match=r"; give more `memory` \(Python"):
            find_fit(replace(found, memory=least // 2), config)


def test_process_memory_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few megabytes more or less, and the leftovers of a closed engine, change no plan."""
    monkeypatch.setattr(process_memory, "_first_runtime", 0)
    held = [process_memory.RUNTIME - 150_000_000]
    monkeypatch.setattr(process_memory, "resident_bytes", lambda: held[0])
    first = process_memory.runtime_overhead(fresh=False)
    assert first >= held[0]
    held[0] = process_memory.RUNTIME - 71_000_000
    assert process_memory.runtime_overhead(fresh=True) == first, "steps hide what runs differ by"
    held[0] = 900_000_000
    assert process_memory.runtime_overhead(fresh=False) == first
    beside = process_memory.runtime_overhead(fresh=True)
    assert beside >= held[0] and beside - held[0] < 96_000_001, "another engine that is open counts"
    assert process_memory.runtime_overhead(fresh=False) == first
    monkeypatch.setattr(process_memory, "_first_runtime", 0)
    assert process_memory.runtime_overhead(fresh=False) == beside


def test_conversation_cache_is_reserved_first(
    opened: Callable[..., OpenedModels], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = opened(context=None)
    monkeypatch.setattr(type(found.target.skeleton), "context_length", property(lambda skeleton: 8192))
    talking = replace(found.config, converses=True)
    least, _ = min_memory(found, found.config)
    decided = [
        [find_fit(replace(found, memory=memory), config) for config in (found.config, talking)]
        for memory in range(least, least + 200 * MB, 8 * MB)
    ]
    for usual, roomy in decided:
        assert roomy.context >= usual.context
        assert roomy.context >= 2048 or roomy == usual, "where there is no room, it is what it always is"
    assert any(roomy.context > usual.context for usual, roomy in decided)
    assert decided[-1][0] == decided[-1][1]


@pytest.mark.parametrize("draft", ["itself", "self", "early-exit"])
def test_embeddings_are_counted(
    draft: str, opened: Callable[..., OpenedModels], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = opened(draft_bits=2, draft="self" if draft == "itself" else draft)
    if draft == "itself":
        drafts = replace(found.drafts, names=(found.config.model,))
        found = replace(found, config=replace(found.config, draft=found.config.model), drafts=drafts)
    held = next(iter(_modes(found, found.config)))

    def needed() -> int:
        with pytest.raises(CapacityError) as error:
            find_fit(replace(found, memory=1), found.config, draft_storage=held)
        return error.value.needed

    size, before = found.target.embedding_bytes, needed()
    monkeypatch.setattr(type(found.target), "embedding_bytes", 0)
    assert before - needed() >= size >= 96 * 256 * 2


def test_each_sequence_has_own_caches(
    opened: Callable[..., OpenedModels], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = opened(draft="self")
    assert found.draft is not None
    config, vocabulary = found.config, found.target.skeleton.vocab_size
    more = replace(config, sequences=5, budget=80)  # as many nodes for one tree as in `config`
    rows = (config.context or 0) + (config.budget or 0)
    draft = draft_bytes(("packed", 4), found.draft, config, 128)
    drafts = draft_bytes(("packed", 4), found.draft, more, 128)
    each = (drafts - draft) // 4
    assert each >= found.draft.cache_bytes(128)
    one, five = find_fit(found, config), find_fit(found, more)
    assert cache_bytes(found, config, one) == found.target.cache_bytes(rows)
    assert cache_bytes(found, more, five) == 5 * found.target.cache_bytes(rows)
    least = min_memory(found, more)[0]
    given = replace(found, memory=least + MB)
    assert still_fits(given, more, find_fit(given, more)) and not still_fits(
        replace(found, memory=least - MB), more, five
    )
    assert not still_fits(replace(found, memory=least - MB), more, find_fit(given, more))

    def needed(config: EngineConfig) -> int:
        with pytest.raises(CapacityError) as error:
            find_fit(replace(found, memory=1), config, draft_storage=("packed", 4))
        return error.value.needed

    monkeypatch.setattr(type(found.target), "activation_bytes", lambda *given: 0)
    taken = 4 * (found.target.cache_bytes(rows) + each + CACHED_ROWS * 4 * vocabulary)
    products = (HEAD_ROWS - 2 * (config.width or 0)) * 4 * vocabulary  # of several trees together
    scored = 4 * 3 * (config.width or 0) * 4 * vocabulary  # memory of scorers without shared buffers
    added = needed(more) - needed(config)
    assert taken + products <= added < taken + products + scored


def test_each_sequence_has_memory_for_its_caches_without_a_draft(opened: Callable[..., OpenedModels]) -> None:
    found = opened(draft="none", sequences=4)
    least, of_one = (min_memory(found, replace(found.config, sequences=count))[0] for count in (4, 1))
    assert least - of_one >= 3 * found.target.cache_bytes(128 + 64) > 0
    given = replace(found, memory=least)
    assert still_fits(given, found.config, find_fit(given, found.config))
    with pytest.raises(CapacityError):
        find_fit(replace(found, memory=least - MB), found.config)


def test_sequences_do_not_displace_layers(opened: Callable[..., OpenedModels]) -> None:
    settings = {"draft": "none", "sequences": "auto"}
    assert opened(**settings).config.sequences == 8, "all fits"
    found = opened(**settings, context=512)
    config = replace(found.config, sequences=1)
    counts = set[int]()
    least = min_memory(found, config)[0]
    for memory in range(least, least + 120 * MB, 8 * MB):
        given = replace(found, memory=memory)
        count = max_sequences(given, found.config)
        counts.add(count)
        resident = [len(find_fit(given, replace(config, sequences=n)).placement.resident) for n in (1, count)]
        assert resident[0] - resident[1] <= 0.05 * len(found.target.layers)
    assert {1, 8} <= counts


@pytest.mark.parametrize("wrong", [0, "many", 2.5])
def test_sequences_are_a_number_or_auto(wrong: Any) -> None:
    with pytest.raises(RequestError, match="sequences must be 1 or above, or auto"):
        EngineConfig("model", sequences=wrong)
