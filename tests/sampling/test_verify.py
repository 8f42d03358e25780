"""The walk down a tree: as long as the target agrees, and no further than the end of the answer."""

from collections.abc import Sequence

import pytest
import torch

from offspec.core.config import SamplingParams
from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.noise import GumbelNoise
from offspec.sampling.token_tree import TokenTree
from offspec.sampling.verify import LazyLogits, VerifyResult, verify_tree

V = 6
TREE = TokenTree.build([0, 1, 2, 3, 4], [-1, 0, 1, 2, 0], [0.0, -0.1, -0.2, -0.3, -3.0])


def walked(choices: dict[int, int], stop: int = -1) -> VerifyResult:
    """choices: the target's token at each node."""

    def logits(nodes: Sequence[int]) -> torch.Tensor:
        rows = torch.zeros(len(nodes), V)
        for row, node in zip(rows, nodes, strict=True):
            row[choices[node]] = 1.0
        return rows

    processor = LogitsProcessor(SamplingParams(), V, [])
    return verify_tree(TREE, LazyLogits(TREE, logits, 1), processor, None, 0, lambda token: token == stop)


def test_walk_follows_the_target() -> None:
    assert walked({0: 1, 1: 2, 2: 3, 3: 5}).tokens == (1, 2, 3, 5)
    assert walked({0: 1, 1: 4}).tokens == (1, 4), "4 hangs below another node"
    found = walked({0: 4, 4: 1})
    assert (found.nodes, found.tokens, found.stopped) == ((0, 4), (4, 1), False)


def test_walk_stops_at_an_end_token() -> None:
    found = walked({0: 1, 1: 2, 2: 3, 3: 5}, stop=2)
    assert (found.nodes, found.tokens, found.stopped) == ((0, 1), (1, 2), True)


def test_rows_of_likely_nodes_are_computed_together() -> None:
    asked: list[list[int]] = []

    def logits(nodes: Sequence[int]) -> torch.Tensor:
        asked.append(list(nodes))
        return torch.arange(V).float().expand(len(nodes), V) + torch.tensor(nodes)[:, None]

    rows = LazyLogits(TREE, logits, 3)
    assert [int(rows[node][0]) for node in (0, 1, 2, 3, 4)] == [0, 1, 2, 3, 4]
    assert asked == [[0, 1, 2], [3], [4]], "the most likely first, then the rows below the others"
    rows = LazyLogits(TREE, logits, 9)
    assert 1 not in rows and int(rows[1][0]) == 1 and 3 in rows and 0 not in rows


@pytest.mark.parametrize("together", [1, 16])
def test_batch_size_of_rows_changes_nothing(together: int) -> None:
    every = 3 * torch.randn(5, V, generator=torch.Generator().manual_seed(8))
    every[0, 1] = every[1, 2] = 9.0
    params = SamplingParams(temperature=0.8, seed=2, top_p=0.9, repetition_penalty=1.1, logprobs=2)
    processor, noise = LogitsProcessor(params, V, [1, 5]), GumbelNoise(2, V)
    rows = LazyLogits(TREE, lambda nodes: every[list(nodes)], together)
    found = verify_tree(TREE, rows, processor, noise, 7, lambda token: False)
    assert found.nodes[:2] == (0, 1) and len(found.logprobs) == len(found.tokens)
    path: list[int] = []
    for node, token, gap in zip(found.nodes, found.tokens, found.logit_gaps, strict=True):
        assert processor.choose(every[node], path, noise, 8 + len(path)) == (token, gap)
        path.append(token)
