"""Caches of recurrent models: states that are committed, dropped, resumed and copied."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from offspec.model import attention, runner
from offspec.model.attention import TreeContext
from offspec.model.cache import TreeCache
from offspec.model.loaded import LoadedModel
from offspec.model.recurrence.snapshots import MOST, SPACING
from offspec.sampling.token_tree import TokenTree
from tests.support.exhaustive import sampled_params
from tests.support.tiny_models import HYBRIDS, load_all, open_model, write_hybrid

TEXT = [3 + (7 * i * i + i) % 90 for i in range(64)]
USUAL = ("kimi_linear", "lfm2", "mamba")


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Iterator[LoadedModel]:
    model = open_model(folder)
    load_all(model, 128)
    yield model
    model.close()


@pytest.fixture
def model(loaded: LoadedModel) -> LoadedModel:
    loaded.tree_model.cache.rewind(0)
    loaded.tree_model.chunk = 128
    return loaded


every = pytest.mark.parametrize("folder", sampled_params(sorted(HYBRIDS), *USUAL), indirect=True)
usual = pytest.mark.parametrize(
    "folder", sampled_params((*USUAL, "falcon_h1", "qwen3_5_text"), *USUAL), indirect=True
)


@torch.no_grad()
def run(model: LoadedModel, text: Sequence[int], tree: TokenTree) -> torch.Tensor:
    """Return hidden states of text rows and tree rows after the committed positions."""
    start, rows = model.tree_model.cache.length, len(text)
    positions = torch.cat([torch.arange(rows), rows + torch.from_numpy(tree.depth)]) + start
    context = TreeContext(start, positions, rows, torch.from_numpy(tree.ancestors()))
    return model.tree_model.hidden(torch.tensor([*text, *tree.token.tolist()]), context)


def tree_of(tokens: Sequence[int], parents: Sequence[int]) -> TokenTree:
    return TokenTree.build(list(tokens), list(parents), [0.0] * len(tokens))


def states(cache: TreeCache) -> list[torch.Tensor]:
    committed = [recurrence.committed for _, recurrence in sorted(cache.recurrences.items())]
    return [part for found in committed for part in (found.tail, found.state) if part is not None]


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


def _looks_at_itself(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: object,
    *,
    out: torch.Tensor,
    **how: object,
) -> None:
    rows, groups = query.shape[2], query.shape[1] // key.shape[1]
    out.copy_(value[:, :, -rows:].repeat_interleave(groups, 1))


@every
def test_states_have_the_same_bits_however_they_are_computed(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As text, as text in parts, as committed paths of trees, and one by one."""
    monkeypatch.setattr(attention, "tree_attention", _looks_at_itself)
    cache, one = model.tree_model.cache, tree_of([TEXT[20]], [-1])
    last = run(model, TEXT[:20], one)[-1]
    cache.commit(20, [0])
    wanted = states(cache)

    def fresh() -> None:
        cache.rewind(0)

    fresh()
    model.tree_model.chunk = 7
    assert torch.equal(run(model, TEXT[:20], one)[-1], last)
    cache.commit(20, [0])
    assert same(states(cache), wanted)

    fresh()
    run(model, TEXT[:10], tree_of([TEXT[10], 5, 6, TEXT[11], 7, TEXT[12]], [-1, 0, 1, 0, 3, 3]))
    cache.commit(10, [0, 3, 5])
    nodes = [0, 1, 3, 4, 6, 7, 8, 9]
    tokens = [TEXT[13], TEXT[14], 9, *TEXT[15:17], 8, *TEXT[17:21], 4]
    hidden = run(model, [], tree_of(tokens, [-1, 0, 0, 1, 3, 3, 4, 6, 7, 8, 8]))
    assert torch.equal(hidden[9], last)
    cache.commit(0, nodes)
    assert cache.length == 21 and same(states(cache), wanted)

    fresh()
    for token in TEXT[:21]:
        hidden = run(model, [], tree_of([token], [-1]))
        cache.commit(0, [0])
    assert torch.equal(hidden[-1], last) and same(states(cache), wanted)


@usual
def test_uncommitted_rows_leave_no_trace(model: LoadedModel) -> None:
    cache = model.tree_model.cache
    run(model, TEXT[:20], tree_of(TEXT[20:22], [-1, 0]))
    cache.commit(20, [0, 1])
    before = [part.clone() for part in states(cache)]
    run(model, TEXT[22:40], tree_of(TEXT[40:44], [-1, 0, 1, 1]))
    cache.rewind(22)
    assert cache.length == 22 and same(states(cache), before)
    run(model, [], tree_of(TEXT[40:44], [-1, 0, 1, 1]))
    cache.commit(0, [])
    assert cache.length == 22 and same(states(cache), before)


@usual
def test_a_rewind_goes_back_to_the_end_of_a_prompt(model: LoadedModel) -> None:
    cache, one = model.tree_model.cache, tree_of([9], [-1])
    kept = list[list[torch.Tensor]]()
    for turn in range(3):
        run(model, TEXT[20 * turn : 20 * turn + 19], one)
        cache.commit(19, [])
        kept.append([part.clone() for part in states(cache)])
        run(model, [], one)
        cache.commit(0, [0])
    assert cache.rewind(59) == 59 and same(states(cache), kept[2]), "the question again"
    assert cache.rewind(50) == 40, "another question after the same answer"
    assert cache.rewind(39) == 39 and same(states(cache), kept[1])
    assert cache.rewind(38) == 20
    assert cache.rewind(19) == 0 and not states(cache), "snapshots of two turns fit"


@usual
def test_a_long_answer_has_intermediate_snapshots(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "CHUNK", 64)
    cache = model.tree_model.cache
    chain = tree_of(TEXT, range(-1, len(TEXT) - 1))
    for _ in range(2 * SPACING // len(TEXT) + 1):
        run(model, [], chain)
        cache.commit(0, range(len(TEXT)))
    assert len(cache.snapshots.lengths) == 2 <= MOST
    assert cache.rewind(cache.length - 1) == 2 * SPACING
    assert cache.rewind(2 * SPACING - 1) == SPACING


@usual
def test_states_are_copied_with_their_length(model: LoadedModel, folder: Path) -> None:
    """To the self-draft, which continues from the target's position."""
    cache = model.tree_model.cache
    run(model, TEXT[:30], tree_of([9], [-1]))
    cache.commit(30, [0])
    other = open_model(folder)
    load_all(other, 128)
    drafts = other.tree_model.cache
    drafts.append_committed(0, cache.committed(0))
    drafts.copy_states(cache)
    assert drafts.length == cache.length == 31 and same(states(drafts), states(cache))
    ahead = tree_of(TEXT[31:34], [-1, 0, 1])
    assert torch.allclose(run(other, [], ahead), run(model, [], ahead), atol=1e-4)
    cache.commit(0, [0, 1])
    assert not same(states(drafts), states(cache)), "each cache has its own"
    other.close()
