"""EAGLE heads draft by their published formula, after commits, rewinds and batched expansion.
In an engine they receive the target's states, and never change its output.
"""

import gc
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from offspec.core.config import SamplingParams
from offspec.draft.base import Features
from offspec.draft.heads import files, state_drafter
from offspec.draft.heads.base import OpenedHead, TargetShape
from offspec.draft.heads.eagle import EagleLayer, opened
from offspec.draft.heads.eagle_files import kind_of
from offspec.draft.heads.files import open_files
from offspec.draft.heads.state_drafter import StateDrafter
from offspec.model.parts import TargetParts
from tests.support.drafter_logits import CALLS, CHAINS, RecordingScorer, node_logits, paths, tree_below
from tests.support.eagle_files import (
    KNOWN,
    LAYERS,
    OFFSETS,
    Head,
    ReferenceEagle,
    features,
    make_head,
    write_head,
)
from tests.support.tiny_models import VOCABULARY, load_all, open_model, reference, tiny_engine, write_model

IDS = [5, 9, 17, 33, 64, 20, 21, 22, 9, 50, 51, 52, 3, 4]
_PRODUCTS = ("fc", *(f"self_attn.{name}_proj" for name in "qkv"))
_LINEAR = {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 500.0}

HEADS: dict[str, Head] = {
    "eagle": make_head("eagle", own_embedding=True),
    "eagle, the target's embedding": make_head("eagle"),
    "eagle, biases": make_head("eagle", biases=_PRODUCTS),
    "eagle, one bias of three": make_head("eagle", biases=["self_attn.k_proj"], config={"head_dim": 16}),
    "eagle, linear positions": make_head("eagle", config=_LINEAR),
    "eagle of speculators": make_head("eagle", biases=["fc"], speculators=True),
    "eagle3": make_head("eagle3"),
    "eagle3, all tokens": make_head("eagle3", known=VOCABULARY, config=_LINEAR),
    "eagle3, of another width": make_head(
        "eagle3", own_embedding=True, width=24, outer={"target_hidden_size": 32}, biases=_PRODUCTS
    ),
    "eagle3, layers by their outputs": make_head(
        "eagle3", taps=(2, 3, 7), outer={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}}
    ),
    "eagle3 of speculators": make_head(
        "eagle3",
        speculators=True,
        norm_before_residual=True,
        own_embedding=True,
        taps=(8, 1),
        outer={"eagle_aux_hidden_state_layer_ids": [8, 1]},
    ),
    "eagle3 of speculators, norms all over": make_head("eagle3", speculators=True, input_norm=True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("eagle") / "target", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def parts(folder: Path) -> TargetParts:
    model = open_model(folder)
    load_all(model, 16)
    return TargetParts(model)


def open_head(folder: Path, parts: TargetParts) -> OpenedHead:
    found = open_files(folder, str(folder))
    assert found is not None and kind_of(found.config, found.names)
    sizes = parts.hidden_size, parts.vocab_size, parts.layers
    return opened(found, TargetShape("target", *sizes, parts.dtype, parts.device, parts.config))


class EagleHarness:
    """A drafter with simulated target states, and the formula to compare it with."""

    def __init__(self, head: Head, parts: TargetParts, folder: Path, rows: int = 64) -> None:
        self.opened = open_head(write_head(folder / "head", head), parts)
        drafter = self.opened.load(parts, rows)
        assert isinstance(drafter, StateDrafter) and isinstance(drafter._layer, EagleLayer)
        self.drafter, self.layer = drafter, drafter._layer
        self.naive = ReferenceEagle(head, parts.embed(torch.arange(VOCABULARY)), parts.project)

    def observe(self, start: int, end: int, seed: int = 0) -> None:
        """Feed the target's states of positions [start, end), the required ones only."""
        given = features(start, end - start, seed)
        wanted = {layer: given.inputs[layer] for layer in self.drafter.required_states.layers}
        self.drafter.observe(Features(start, given.last, wanted))

    def check(
        self,
        ids: Sequence[int],
        calls: Sequence[Sequence[int]] = CALLS,
        begin: int = 0,
        known: Features | None = None,
    ) -> None:
        """Check every node of a tree below the ids; begin: the first position with known states."""
        known = known or features(begin, len(ids) - 1 - begin)
        with torch.no_grad():
            wanted = torch.stack([self.naive.logits(ids, path, known) for path in paths()])
        found = node_logits(self.drafter, ids, calls)
        assert torch.isfinite(wanted).any(1).all() and wanted[torch.isfinite(wanted)].std() > 0.1
        assert torch.equal(torch.isfinite(found), torch.isfinite(wanted))
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)


@pytest.fixture(params=["eagle", "eagle3"])
def bench(request: pytest.FixtureRequest, parts: TargetParts, tmp_path: Path) -> EagleHarness:
    return EagleHarness(HEADS[request.param], parts, tmp_path)


@pytest.mark.parametrize("name", sorted(HEADS))
def test_every_layout_follows_its_formula(name: str, parts: TargetParts, tmp_path: Path) -> None:
    bench = EagleHarness(HEADS[name], parts, tmp_path)
    bench.observe(0, 7)
    for calls in (CALLS, CHAINS, [[0, 1, 2, 3, 4, 5, 6]]):
        bench.check(IDS[:8], calls)


def test_passes_rewinds_and_other_requests(bench: EagleHarness) -> None:
    bench.observe(0, 7)
    bench.check(IDS[:8])
    bench.drafter.commit([0, 1, 3])  # the root and two draft tokens: their entries are recomputed
    bench.observe(7, 10)
    bench.check(IDS[:11], CHAINS)
    bench.drafter.commit([0])
    bench.observe(10, 11)
    bench.check(IDS[:12])
    bench.drafter.rewind(5)  # another text with the same beginning: position 4 is followed by another token
    other = [*IDS[:5], 70, 71, 72]
    bench.observe(5, 7)
    bench.check(other)
    bench.drafter.rewind(6)
    bench.check(other[:7])  # no new tokens: the last was known before the rewind
    bench.drafter.rewind(0)
    bench.observe(0, 3)
    bench.check(IDS[:4])
    bench.check(IDS[:4], CHAINS)  # the same root again
    bench.check([*IDS[:3], 77])  # and another


def test_pass_repeated_with_other_states(bench: EagleHarness) -> None:
    """Known positions are observed again, as after an interrupted pass."""
    bench.observe(0, 7)
    bench.check(IDS[:8])
    bench.observe(4, 9, seed=1)
    first, second = features(0, 4), features(4, 5, seed=1)
    inputs = {layer: torch.cat([first.inputs[layer], second.inputs[layer]]) for layer in first.inputs}
    bench.check(IDS[:10], known=Features(0, torch.cat([first.last, second.last]), inputs))


def _children_shape(bench: EagleHarness, ids: Sequence[int], nodes: Sequence[int] = (0,)) -> tuple[int, ...]:
    """Return the shape of the children below nodes."""
    bench.drafter.start(ids)
    children = bench.drafter.expand(tree_below(ids[-1]), nodes, RecordingScorer())
    assert children.token.shape == children.log_prob.shape == children.x.shape
    return children.token.shape


def test_head_added_later_starts_at_the_first_state(bench: EagleHarness) -> None:
    assert _children_shape(bench, IDS) == (1, 0), "nothing is drafted before the first pass"
    assert _children_shape(bench, IDS, [1, 2]) == (2, 0)  # other sources may propose tokens below the root
    bench.observe(6, 9)
    bench.check(IDS[:10], begin=6)
    assert _children_shape(bench, IDS[:12]) == (1, 0), "states end before the root"
    bench.observe(9, 12)
    bench.check(IDS[:13], begin=6)
    bench.drafter.rewind(4)  # before all known states
    assert _children_shape(bench, IDS[:5]) == (1, 0)
    bench.observe(4, 7)
    bench.check(IDS[:8], begin=4)
    bench.observe(9, 12)  # a gap: states before it are useless
    bench.check(IDS[:13], begin=9)


def test_long_texts_are_processed_in_parts_and_grow_the_buffers(
    parts: TargetParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_drafter, "_CHUNK", 5)
    bench = EagleHarness(HEADS["eagle3"], parts, tmp_path, rows=4)
    looked: list[int] = []
    bench.drafter.set_cancel_check(lambda: looked.append(bench.layer.cache.rows[0].filled))
    bench.observe(0, 9)
    bench.observe(9, 13)
    bench.check(IDS)
    assert looked[:4] == [0, 4, 8, 13]  # thirteen entries in three parts, then the tree


def test_cancelled_step_has_no_effect(bench: EagleHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_drafter, "_CHUNK", 5)
    bench.observe(0, 13)
    for calls in (2, 4):  # in the middle of the text, and of the tree
        left = iter(range(calls))

        def look(left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt

        bench.drafter.set_cancel_check(look)
        with pytest.raises(KeyboardInterrupt):
            node_logits(bench.drafter, IDS)
    bench.drafter.set_cancel_check(None)
    bench.check(IDS)


def test_eagle3_ids_are_mapped_by_offsets(parts: TargetParts, tmp_path: Path) -> None:
    bench = EagleHarness(HEADS["eagle3"], parts, tmp_path)
    bench.observe(0, 13)
    drafted_ids = torch.isfinite(node_logits(bench.drafter, IDS)).nonzero()[:, 1].unique()
    assert drafted_ids.tolist() == [index + int(OFFSETS[index]) for index in range(KNOWN)]


def test_memory_matches_the_forecast_and_is_freed_on_close(bench: EagleHarness) -> None:
    head = HEADS[bench.opened.kind]
    weights = sum(tensor.numel() for name, tensor in head.tensors.items() if name != "t2d")
    bench.observe(0, 13)
    bench.check(IDS)
    rows, known = bench.layer.cache.rows[0], bench.drafter._known._rows
    assert rows.keys is not None and rows.values is not None
    kept = rows.keys.nbytes + rows.values.nbytes + known.nbytes
    assert bench.opened.nbytes(64) == 4 * weights + kept
    layer = bench.layer
    held = [*layer._weights.values(), layer._qkv[0], layer._fc[0], rows.keys, known]
    references = [weakref.ref(x) for x in held]
    bench.drafter.close()
    del rows, known, held
    gc.collect()
    assert all(reference() is None for reference in references)


def _loaded(head: Head, folder: Path, place: Path, device: torch.device) -> StateDrafter:
    model = open_model(folder, device=device)
    load_all(model, 16)
    parts = TargetParts(model)
    drafter = open_head(write_head(place, head), parts).load(parts, 64)
    assert isinstance(drafter, StateDrafter)
    return drafter


def _states(head: Head, folder: Path, ids: list[int]) -> torch.Tensor:
    """Return states [n, E] of all positions but the last, from transformers' own hidden states."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        every = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
    if head.kind == "eagle":
        last: torch.Tensor = every[-1][0]  # after the final norm
        return last
    return torch.cat([every[tap][0] for tap in head.taps], dim=1) @ head.tensors["fc.weight"].T


@pytest.mark.usefixtures("drafters_stay")
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_states_and_answers_equal_the_targets(
    kind: str, folder: Path, device: torch.device, tmp_path: Path
) -> None:
    head = make_head(kind)
    drafter = _loaded(head, folder, tmp_path / "head", device)
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    settings = {"budget": 12, "width": 4, "more": lambda target: {"head": drafter}}
    with tiny_engine(folder, "none", device=device, **settings) as engine:
        for prompt in (IDS[:9], [*IDS[:6], 70, 71]):  # the next begins like the last
            drafted_ids = engine.generate(prompt, greedy).token_ids
            assert list(drafted_ids) == reference(folder, prompt, 12)
            known = drafter._known.of(0, drafter._known.end)
            assert drafter._known.start == 0 and len(known) > len(prompt)
            assert drafter._layer.cache.length > len(prompt), "the head was used"
            wanted = _states(head, folder, [*prompt, *drafted_ids])[: len(known)]
            torch.testing.assert_close(known.cpu(), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("kind", "more"), [("eagle", 2), ("eagle3", -2)])
def test_vocabulary_with_different_padding(
    kind: str, more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that the head lacks are embedded as its last one, and none beyond the target's are drafted."""
    monkeypatch.setattr(files, "_PADDING", 40)
    size = VOCABULARY + more
    folder = write_model(tmp_path / "target", num_hidden_layers=LAYERS, vocab_size=size)
    head = make_head(kind, own_embedding=True, known=VOCABULARY)
    drafter = _loaded(head, folder, tmp_path / "head", torch.device("cpu"))
    if kind == "eagle3":
        assert drafter.name == f"EAGLE-3 ({size} of {size} tokens)"
    prompt = [*IDS[:9], size - 1]
    with tiny_engine(folder, "none", budget=12, width=4, more=lambda target: {"head": drafter}) as engine:
        drafted_ids = engine.generate(prompt, SamplingParams(temperature=0.0, max_tokens=12)).token_ids
    assert list(drafted_ids) == reference(folder, prompt, 12)
    assert drafter._known.end == 0 and drafter._layer.cache.length == 0, "closed with the engine"
