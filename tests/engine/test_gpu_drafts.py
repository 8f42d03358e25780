"""Drafts made of parts of the target, with experts streamed to a CUDA device."""

from pathlib import Path

import pytest
import torch

from offspec.checkpoint import open_checkpoint
from offspec.draft.base import Drafter
from offspec.draft.early_exit import EarlyExitDrafter
from offspec.draft.heads.base import TargetShape
from offspec.draft.heads.mtp import open_mtp
from offspec.model.loaded import LoadedModel
from offspec.model.parts import TargetParts
from offspec_planners.placement import Placement, Tier
from tests.support.answers import PROMPT, generate_tokens, sampling
from tests.support.mtp_files import GLM, write_with_mtp
from tests.support.tiny_models import reference, tiny_engine

pytestmark = pytest.mark.gpu
ROWS = 128


def test_tokens_are_those_of_the_cpu(tmp_path: Path) -> None:
    """The last turn goes on over rows that were committed, compacted and cut back."""
    folder = write_with_mtp(tmp_path / "target", "deepseek", "glm4_moe", GLM)

    def load(target: LoadedModel) -> dict[str, Drafter]:
        config = target.skeleton.config
        shape = TargetShape(
            "model", config.hidden_size, target.skeleton.vocab_size, 3, target.dtype, target.device, config
        )
        module = open_mtp(open_checkpoint(str(folder)), shape)
        assert module is not None
        parts = TargetParts(target)
        return {"mtp": module.load(parts, ROWS), "early-exit": EarlyExitDrafter(target, ROWS)}

    greedy, sampled = sampling(0.0, 10), sampling(1.0, 10)
    answer = reference(folder, PROMPT, 10)
    again = [*PROMPT, *answer[:6], 40, 41]
    (expected,) = generate_tokens(folder, sampled, prompt=again)
    settings = {"budget": 8, "width": 4, "placement": Placement((Tier.DEVICE, Tier.HOST, Tier.DISK), 2, 2)}
    with tiny_engine(folder, "none", more=load, device=torch.device("cuda"), **settings) as engine:
        for draft in ("mtp", "early-exit"):
            assert list(engine.generate(PROMPT, greedy, draft=draft).token_ids) == answer
        assert engine.generate(again, sampled, draft="mtp,early-exit").token_ids == expected
