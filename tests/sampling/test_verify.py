"""The walk down a tree: as far as the target agrees, and no further than the end of the answer."""

import torch

from offspec.core.config import SamplingParams
from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.token_tree import TokenTree
from offspec.sampling.verify import Walk, walk

V = 6
TREE = TokenTree.build([0, 1, 2, 3, 4], [-1, 0, 1, 2, 0], [0.0, -0.1, -0.2, -0.3, -3.0])


def walked(choices: dict[int, int], stop: int = -1) -> Walk:
    """choices: the target's token at each node."""

    def logits(node: int) -> torch.Tensor:
        row = torch.zeros(V)
        row[choices[node]] = 1.0
        return row

    processor = LogitsProcessor(SamplingParams(), V, [])
    return walk(TREE, logits, processor, None, 0, lambda token: token == stop)


def test_it_goes_as_far_as_the_target_agrees() -> None:
    assert walked({0: 1, 1: 2, 2: 3, 3: 5}).tokens == (1, 2, 3, 5)
    assert walked({0: 1, 1: 4}).tokens == (1, 4), "4 hangs below another node"
    found = walked({0: 4, 4: 1})
    assert (found.nodes, found.tokens, found.stopped) == ((0, 4), (4, 1), False)


def test_it_ends_at_the_end_of_an_answer_inside_an_accepted_path() -> None:
    found = walked({0: 1, 1: 2, 2: 3, 3: 5}, stop=2)
    assert (found.nodes, found.tokens, found.stopped) == ((0, 1), (1, 2), True)
    assert walked({0: 1}, stop=1).tokens == (1,)
