"""EAGLE heads draft what their published formula says, whatever was committed, rewound or asked at once."""

import gc
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from offspec.draft.base import Children, Features
from offspec.draft.heads import state_drafter
from offspec.draft.heads.eagle_layer import EagleLayer
from offspec.draft.heads.state_drafter import StateDrafter
from offspec.model.parts import TargetParts
from tests.draft.asking import CALLS, CHAINS, Hearing, ask, paths, tree_below
from tests.draft.eagle_heads import open_head
from tests.support.eagle_files import KNOWN, OFFSETS, Head, Naive, features, make_head, write_head
from tests.support.tiny_models import VOCABULARY

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


class Bench:
    """A drafter that hears what a target would tell it, and the formula to compare it with."""

    def __init__(self, head: Head, parts: TargetParts, folder: Path, rows: int = 64) -> None:
        self.opened = open_head(write_head(folder / "head", head), parts)
        drafter = self.opened.load(parts, rows)
        assert isinstance(drafter, StateDrafter) and isinstance(drafter._layer, EagleLayer)
        self.drafter, self.layer = drafter, drafter._layer
        self.naive = Naive(head, parts.embed(torch.arange(VOCABULARY)), parts.project)

    def observe(self, start: int, end: int, seed: int = 0) -> None:
        """The target's states of positions [start, end), and only what was asked for."""
        given = features(start, end - start, seed)
        wanted = {layer: given.inputs[layer] for layer in self.drafter.wants.layers}
        self.drafter.observe(Features(start, given.last, wanted))

    def check(
        self,
        ids: Sequence[int],
        calls: Sequence[Sequence[int]] = CALLS,
        begin: int = 0,
        known: Features | None = None,
    ) -> None:
        """Every node of a tree below the ids; begin: the first position whose states are known."""
        known = known or features(begin, len(ids) - 1 - begin)
        with torch.no_grad():
            wanted = torch.stack([self.naive.logits(ids, path, known) for path in paths()])
        found = ask(self.drafter, ids, calls)
        assert torch.isfinite(wanted).any(1).all() and wanted[torch.isfinite(wanted)].std() > 0.1
        assert torch.equal(torch.isfinite(found), torch.isfinite(wanted))
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)


@pytest.fixture(params=["eagle", "eagle3"])
def bench(request: pytest.FixtureRequest, parts: TargetParts, tmp_path: Path) -> Bench:
    return Bench(HEADS[request.param], parts, tmp_path)


@pytest.mark.parametrize("calls", [CALLS, CHAINS, [[0, 1, 2, 3, 4, 5, 6]]], ids=["grown", "chains", "once"])
@pytest.mark.parametrize("name", sorted(HEADS))
def test_every_layout_drafts_by_its_formula(
    name: str, calls: Sequence[Sequence[int]], parts: TargetParts, tmp_path: Path
) -> None:
    bench = Bench(HEADS[name], parts, tmp_path)
    bench.observe(0, 7)
    bench.check(IDS[:8], calls)


def test_passes_rewinds_and_other_requests(bench: Bench) -> None:
    bench.observe(0, 7)
    bench.check(IDS[:8])
    bench.drafter.commit([0, 1, 3])  # the root and two guesses: their entries are made again
    bench.observe(7, 10)
    bench.check(IDS[:11], CHAINS)
    bench.drafter.commit([0])
    bench.observe(10, 11)
    bench.check(IDS[:12])
    bench.drafter.rewind(5)  # another text that begins alike: position 4 is followed by another token
    other = [*IDS[:5], 70, 71, 72]
    bench.observe(5, 7)
    bench.check(other)
    bench.drafter.rewind(6)
    bench.check(other[:7])  # nothing new: the last of them was known before it was rewound
    bench.drafter.rewind(0)
    bench.observe(0, 3)
    bench.check(IDS[:4])


def test_a_pass_may_be_made_again_with_other_states(bench: Bench) -> None:
    """Positions that were known already are given anew, as after a pass that was broken off."""
    bench.observe(0, 7)
    bench.check(IDS[:8])
    bench.observe(4, 9, seed=1)
    first, second = features(0, 4), features(4, 5, seed=1)
    mixed = Features(
        0,
        torch.cat([first.last, second.last]),
        {layer: torch.cat([first.inputs[layer], second.inputs[layer]]) for layer in first.inputs},
    )
    bench.check(IDS[:10], known=mixed)


def test_the_same_root_may_be_asked_again_and_become_another(bench: Bench) -> None:
    bench.observe(0, 7)
    bench.check(IDS[:8])
    bench.check(IDS[:8], CHAINS)
    bench.check([*IDS[:7], 77])


def test_heads_that_come_later_begin_where_states_do(bench: Bench) -> None:
    bench.observe(6, 9)
    bench.check(IDS[:10], begin=6)
    bench.observe(9, 12)
    bench.check(IDS[:13], begin=6)
    bench.drafter.rewind(4)  # before all that is known
    assert _asked_of_root(bench, IDS[:5]).token.shape == (1, 0)
    bench.observe(4, 7)
    bench.check(IDS[:8], begin=4)
    bench.observe(9, 12)  # a gap: what lies before it is of no use
    bench.check(IDS[:13], begin=9)


def _asked_of_root(bench: Bench, ids: Sequence[int]) -> Children:
    bench.drafter.start(ids)
    return bench.drafter.expand(tree_below(ids[-1]), [0], Hearing())


def test_before_the_first_pass_there_is_nothing_to_say(bench: Bench) -> None:
    bench.drafter.start(IDS)
    for nodes in ([0], [1, 2]):  # others may guess below the root
        children = bench.drafter.expand(tree_below(IDS[-1]), nodes, Hearing())
        assert children.token.shape == children.log_prob.shape == children.x.shape == (len(nodes), 0)
    bench.observe(0, 5)
    assert _asked_of_root(bench, IDS[:8]).token.shape == (1, 0)  # states end before the root
    bench.check(IDS[:6])


def test_long_texts_go_in_parts_and_outgrow_what_was_promised(
    parts: TargetParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_drafter, "_CHUNK", 5)
    bench = Bench(HEADS["eagle3"], parts, tmp_path, rows=4)
    looked: list[int] = []
    bench.drafter.between = lambda: looked.append(bench.layer.cache.rows[0].filled)
    bench.observe(0, 9)
    bench.observe(9, 13)
    bench.check(IDS)
    assert looked[:4] == [0, 4, 8, 13]  # thirteen entries in three parts, then the tree


def test_what_breaks_a_step_off_leaves_no_trace(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_drafter, "_CHUNK", 5)
    bench.observe(0, 13)
    for calls in (2, 4):  # in the midst of the text, and of the tree
        left = iter(range(calls))

        def look(left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt

        bench.drafter.between = look
        with pytest.raises(KeyboardInterrupt):
            ask(bench.drafter, IDS)
    bench.drafter.between = None
    bench.check(IDS)


def test_ids_of_eagle3_are_moved_by_offsets(parts: TargetParts, tmp_path: Path) -> None:
    bench = Bench(HEADS["eagle3"], parts, tmp_path)
    bench.observe(0, 13)
    said = torch.isfinite(ask(bench.drafter, IDS)).nonzero()[:, 1].unique()
    assert said.tolist() == [index + int(OFFSETS[index]) for index in range(KNOWN)]


def test_what_it_takes_is_what_was_said(bench: Bench) -> None:
    head = HEADS[bench.opened.kind]
    weights = sum(tensor.numel() for name, tensor in head.tensors.items() if name != "t2d")
    bench.observe(0, 13)
    bench.check(IDS)
    rows = bench.layer.cache.rows[0]
    assert rows.keys is not None and rows.values is not None
    kept = rows.keys.nbytes + rows.values.nbytes + bench.drafter._known._rows.nbytes
    assert bench.opened.nbytes(64) == 4 * weights + kept


def test_a_closed_drafter_holds_nothing(bench: Bench) -> None:
    bench.observe(0, 13)
    bench.check(IDS)
    held = [weakref.ref(x) for x in (*bench.layer._weights.values(), bench.layer._qkv[0], bench.layer._fc[0])]
    held += [weakref.ref(x) for x in (bench.layer.cache.rows[0].keys, bench.drafter._known._rows)]
    assert all(reference() is not None for reference in held)
    bench.drafter.close()
    gc.collect()
    assert all(reference() is None for reference in held)
