"""Checks of the files that options name, made before the slow import of torch."""

from pathlib import Path

from offspec.checkpoint.open import check_draft, check_model, config_only
from offspec.core.config import EngineConfig


def check_files(config: EngineConfig, plan: Path | None = None, *, weights: bool = True) -> None:
    """Check that target, drafts, texts and plan exist and are readable. Raises OffspecError.

    weights: whether the target must have weights; otherwise its config.json is enough.
    """
    if weights or config_only(config.model) is None:
        check_model(config.model)
    for name in config.drafts:
        check_draft(name)
    if config.corpus:
        from offspec.engine.corpus import read_corpus

        read_corpus(config.corpus)
    if plan is not None:
        from offspec.plan.records import read_plan

        read_plan(plan)
