"""What can be found wrong with the files that options name, before torch is imported, which takes seconds."""

from pathlib import Path

from offspec.checkpoint.open import check_model, check_name, config_alone
from offspec.core.config import SOURCES, EngineConfig


def check_files(config: EngineConfig, plan: Path | None = None, *, weights: bool = True) -> None:
    """See that target, drafts, texts and plan are there and can be read. Raises OffspecError.

    weights: whether the target must have any; else its config.json is enough.
    """
    if weights or config_alone(config.model) is None:
        check_model(config.model)
    for name in config.drafts:
        if name not in SOURCES:
            check_name(name)
    if config.corpus:
        from offspec.engine.corpus import read_corpus

        read_corpus(config.corpus)
    if plan is not None:
        from offspec.plan.records import read_plan

        read_plan(plan)
