"""Embedding and head of a target, reduced to common tokens: logits are unchanged."""

from pathlib import Path

import pytest
import torch

from offspec.core.errors import CapacityError
from offspec.distill.embed_head import EmbeddingAndHead, take_embedding_and_head
from offspec.model.parts import TargetParts
from offspec_planners.placement import Placement, Tier
from tests.distill.classroom import loaded
from tests.support.tiny_models import nothing, open_model, write_model

TEXTS = [torch.tensor([5, 5, 5, 9, 9, 70])]


@pytest.mark.parametrize("family", ["granite", "cohere", "gemma2", "phi"])
def test_logits_are_the_family_s(tmp_path: Path, family: str) -> None:
    target = loaded(tmp_path, family)
    embed_head = take_embedding_and_head(target, TEXTS, 2)
    hidden = torch.randn(6, 32)
    with torch.no_grad():
        expected = TargetParts(target).project(hidden)
        embedded = TargetParts(target).embed(torch.tensor([5, 9]))
    target.close()
    torch.testing.assert_close(embed_head.all_logits(hidden), expected, rtol=1e-4, atol=1e-4)
    columns = embed_head.draw(4, torch.Generator().manual_seed(0))
    part = embed_head.logits(hidden, embed_head.rows(columns), columns.token)
    torch.testing.assert_close(part, expected[:, columns.token], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(embed_head.embedding, embedded)


def test_common_tokens_are_the_most_frequent(tmp_path: Path) -> None:
    target = loaded(tmp_path)
    assert take_embedding_and_head(target, TEXTS, 2).common.tolist() == [5, 9]
    embed_head = take_embedding_and_head(target, TEXTS, 50)
    assert embed_head.common.tolist() == [5, 9, 70]
    assert embed_head.place[[5, 9, 70, 0, 95]].tolist() == [0, 1, 2, 3, 3]
    target.close()


def test_the_sample_represents_all_other_tokens() -> None:
    matrix = torch.randn(500, 8)
    embed_head = EmbeddingAndHead(matrix, None, matrix[:20], torch.arange(20), 1.0, None)
    hidden = torch.randn(1, 8)
    truth = embed_head.all_logits(hidden).logsumexp(-1).exp()
    seen = []
    for seed in range(200):
        columns = embed_head.draw(40, torch.Generator().manual_seed(seed))
        logits = embed_head.logits(hidden, embed_head.rows(columns), columns.token)
        seen.append((logits + columns.weight).logsumexp(-1).exp())
        assert columns.token[:20].tolist() == list(range(20))
        assert int(columns.token[20:].min()) >= 20
    assert float(torch.stack(seen).mean() / truth) == pytest.approx(1, abs=0.1)


def test_nothing_is_sampled_if_all_tokens_are_common() -> None:
    matrix = torch.randn(12, 8)
    embed_head = EmbeddingAndHead(matrix, None, matrix, torch.arange(12), 1.0, None)
    columns = embed_head.draw(40, torch.Generator())
    assert columns.token.tolist() == list(range(12))
    assert columns.weight.tolist() == [0.0] * 12


def test_a_head_that_streams_is_refused(tmp_path: Path) -> None:
    target = open_model(write_model(tmp_path, tie_word_embeddings=False))
    target.load(Placement.in_memory(len(target.layers), [], 2, Tier.DISK), 64, nothing)
    with pytest.raises(CapacityError, match="raise `memory`"):
        take_embedding_and_head(target, TEXTS, 2)
    target.close()
