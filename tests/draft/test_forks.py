"""Sources of several sequences share only weights: interleaved, each drafts the same as alone."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

import pytest
import torch

from offspec.checkpoint import open_checkpoint
from offspec.core.events import ignore_event
from offspec.draft.base import Drafter, Features, Lookup
from offspec.draft.cross_vocab.drafter import CrossVocabDrafter, Retokenizer
from offspec.draft.cross_vocab.vocab_map import VocabMap
from offspec.draft.early_exit import EarlyExitDrafter
from offspec.draft.heads.base import TargetShape
from offspec.draft.heads.mtp import open_mtp
from offspec.draft.heads.open import open_head
from offspec.draft.lm import LMDrafter
from offspec.draft.lookup.ngram import NgramLookup
from offspec.draft.lookup.suffix import SuffixLookup
from offspec.draft.mix.sources import Sources
from offspec.model.attention import TreeContext
from offspec.model.cache import TreeCache
from offspec.model.loaded import LoadedModel
from offspec.model.parts import TargetParts
from offspec.model.pass_parts import SequenceRows
from offspec.model.tokenizer import load_tokenizer
from tests.support import eagle_files
from tests.support.drafter_logits import CALLS, CHAINS, RecordingScorer, tree_below
from tests.support.exhaustive import sampled_params
from tests.support.heads_files import MEDUSA_CONFIG, medusa_tensors, mlp_config, mlp_tensors, write_head
from tests.support.mtp_files import write_with_mtp
from tests.support.tiny_models import CALIBRATION, load_all, nothing, open_model, write_hybrid, write_model

LAYERS = 9
TURNS = ([0, 1, 3], [0, 2, 6], [0])


@dataclass(frozen=True)
class Target:
    """A loaded target and its folder."""

    folder: Path
    model: LoadedModel

    @property
    def parts(self) -> TargetParts:
        return TargetParts(self.model)


Make = Callable[[Target, Path], Drafter]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    write_with_mtp(folder, "mimo", "qwen2", {"num_hidden_layers": LAYERS})  # states that the heads here read
    model = open_model(folder)
    load_all(model, 16)
    return Target(folder, model)


def lm(model: LoadedModel, *, lean: bool, target: TreeCache | None = None) -> LMDrafter:
    made = model.fused_model(16) if lean else model.tree_model
    assert made is not None
    return LMDrafter("draft", made, model.device, model.close, target)


def another_model(target: Target, folder: Path, *, lean: bool) -> Drafter:
    model = open_model(write_model(folder, seed=5))
    load_all(model, 16)
    return lm(model, lean=lean)


def hybrid(target: Target, folder: Path) -> Drafter:
    model = open_model(write_hybrid(folder, "qwen3_5_text"))
    load_all(model, 16)
    return lm(model, lean=False)


def self_draft(target: Target, folder: Path) -> Drafter:
    model = open_model(target.folder)
    model.load_quantized(4, True, 16, nothing, CALIBRATION, target.model.rest_tensors)
    return lm(model, lean=True, target=target.model.tree_model.cache)


def translated(target: Target, folder: Path) -> Drafter:
    drafter = another_model(target, folder, lean=True)
    ours, theirs = load_tokenizer(target.folder), load_tokenizer(folder)
    vocab = VocabMap.between(ours, theirs)
    return CrossVocabDrafter(drafter, vocab, Retokenizer(vocab, ours, theirs), target.model.device)


def shape_of(target: Target) -> TargetShape:
    parts = target.parts
    sizes = parts.hidden_size, parts.vocab_size, parts.layers
    return TargetShape("target", *sizes, parts.dtype, parts.device, parts.config)


def head(target: Target, folder: Path) -> Drafter:
    found = open_head(str(folder), shape_of(target), ignore_event)
    assert found is not None
    return found.load(target.parts, 16)


def mtp(target: Target, folder: Path) -> Drafter:
    module = open_mtp(open_checkpoint(str(target.folder)), shape_of(target))
    assert module is not None
    return module.load(target.parts, 16)


MAKES: dict[str, Make] = {
    "lean": lambda target, folder: another_model(target, folder, lean=True),
    "tree": lambda target, folder: another_model(target, folder, lean=False),
    "hybrid": hybrid,
    "self": self_draft,
    "early-exit": lambda target, folder: EarlyExitDrafter(target.model, 16),
    "another vocabulary": translated,
    "medusa": lambda target, folder: head(
        target, write_head(folder, MEDUSA_CONFIG, medusa_tensors(), "medusa_lm_head.pt")
    ),
    "mlp": lambda target, folder: head(target, write_head(folder, mlp_config(), mlp_tensors())),
    "eagle": lambda target, folder: head(
        target, eagle_files.write_head(folder / "head", eagle_files.make_head("eagle"))
    ),
    "eagle3": lambda target, folder: head(
        target, eagle_files.write_head(folder / "head", eagle_files.make_head("eagle3"))
    ),
    "mtp": mtp,
}


class DraftedText:
    """One text, the target's cache of it, and a drafter that follows it."""

    def __init__(self, target: Target, made: Drafter, seed: int) -> None:
        self.model, self.cache = target.model.tree_model, target.model.tree_model.cache.empty_copy()
        self.drafter = made.fork(self.cache)
        self.ids = torch.randint(
            3, 90, (7 + 9 * seed,), generator=torch.Generator().manual_seed(seed)
        ).tolist()

    def follow(self) -> None:
        """Run the target over all but the root, and feed its states to the drafter."""
        start, rows = self.cache.length, len(self.ids) - 1 - self.cache.length
        wants, tokens = self.drafter.required_states, torch.tensor(self.ids[start:-1])
        context = TreeContext(start, torch.arange(start, start + rows), rows, torch.zeros(0, 0).bool())
        self.model.aux_layers = wants.layers
        hidden = self.model.hidden_of([SequenceRows(tokens, context, self.cache)])
        self.cache.commit(rows, [])
        if wants:
            self.drafter.observe(Features(start, hidden, dict(self.model.aux_hidden_states)))
        self.drafter.adopt_target_cache()

    def drafted(self) -> Iterator[list[torch.Tensor]]:
        """Yield its logits for trees below the text, which is extended, and rewound once."""
        for turn, accepted in enumerate(TURNS):
            self.follow()
            yield []
            tree, hearing = tree_below(self.ids[-1]), RecordingScorer()
            self.drafter.start(self.ids)
            for nodes in (CALLS, CHAINS)[turn % 2]:
                self.drafter.expand(tree, list(nodes), hearing)
                said, hearing.recorded_logits = hearing.recorded_logits, []
                yield said
            self.drafter.commit(accepted)
            self.ids += [*tree.token[accepted[1:]].tolist(), 11 + turn]
            if turn == 1:
                self.ids = [*self.ids[:5], 70, 71]
                self.cache.rewind(5)
                self.drafter.rewind(5)


@torch.no_grad()
@pytest.mark.parametrize("kind", sampled_params(MAKES, "lean", "tree", "mtp", "another vocabulary"))
def test_interleaved_drafters_equal_single_ones(kind: str, target: Target, tmp_path: Path) -> None:
    made = MAKES[kind](target, tmp_path)
    alone = [list(DraftedText(target, made, seed).drafted()) for seed in range(2)]
    sequences = [DraftedText(target, made, seed) for seed in range(2)]
    turns = list(zip_longest(*(sequence.drafted() for sequence in sequences)))
    for found, expected in zip(zip(*turns, strict=True), alone, strict=True):
        assert sum(map(len, expected)) > 8, "it has drafted something"
        for said, wanted in zip(chain(*found), chain(*expected), strict=True):
            assert torch.equal(said, wanted)
    sequences[0].drafter.close()
    again = DraftedText(target, made, 1)
    for said, wanted in zip(chain(*again.drafted()), chain(*alone[1]), strict=True):
        assert torch.equal(said, wanted), "closing one fork keeps the shared weights"
    if kind != "early-exit":
        made.close()


def lookup_results(lookup: Lookup, ids: Sequence[int]) -> Iterator[object]:
    for end in range(8, len(ids), 3):
        lookup.start(ids[:end])
        yield lookup.continuations([], None, 12, -9.0, 8)
        lookup.learn(ids[end : end + 3])
    lookup.rewind(6)
    lookup.start([*ids[:6], 5, 9])
    yield lookup.continuations([], None, 12, -9.0, 8)


@pytest.mark.parametrize("made", [SuffixLookup, NgramLookup])
def test_interleaved_lookups_equal_single_ones(made: type[SuffixLookup | NgramLookup]) -> None:
    first = made()
    if isinstance(first, SuffixLookup):
        first.add_text([5, 9, 40, 41, 42, 43])
    for _ in lookup_results(first, [3, 4] * 20):
        pass  # it has learned
    texts = [[5, 9, 17, 33] * 7, [8, 5, 9, 5] * 7]
    alone = [list(lookup_results(first.fork(), ids)) for ids in texts]
    in_turns = zip(*(lookup_results(first.fork(), ids) for ids in texts), strict=True)
    assert list(map(list, zip(*in_turns, strict=True))) == alone
    fork = first.fork()
    fork.start([5, 9])
    found = fork.continuations([], None, 4, -9.0, 4)
    assert (40 in found.token) == isinstance(first, SuffixLookup), "earlier texts are available to all forks"


def test_fork_of_mixed_sources(target: Target, tmp_path: Path) -> None:
    """A source disabled in one sequence continues in another, and pauses are independent."""
    sources = Sources({"mlp": MAKES["mlp"](target, tmp_path)}, {"lookup": NgramLookup()})
    fork = sources.fork(target.model.tree_model.cache.empty_copy())
    assert fork.names == sources.names and fork.required_states == sources.required_states
    assert all(fork.drafters[name] is not sources.drafters[name] for name in fork.drafters)
    fork.close()
    fork.rewind(0)
    sources.rewind(0)
