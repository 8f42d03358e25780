"""Loading of an engine (`offspec.load`)."""

from collections.abc import Callable
from pathlib import Path
from typing import Unpack

from offspec.core.config import EngineConfig, Settings
from offspec.core.errors import RequestError
from offspec.core.events import Event, Notice, ignore_event
from offspec.core.openmp import end_team, spinning_warning
from offspec.core.private_folders import restrict_permissions
from offspec.core.trace import OFF, Timeline
from offspec.core.values import short_repr
from offspec.draft.lookup.suffix import SuffixLookup
from offspec.engine.corpus import read_corpus
from offspec.engine.engine import Engine
from offspec.plan.choose_device import choose_device
from offspec.plan.prepare import prepare
from offspec.plan.records import read_plan
from offspec_planners.plan import Plan


def load(
    model: str | Path | EngineConfig,
    *,
    plan: str | Path | Plan | None = None,
    replan: bool = False,
    at_once: bool = False,
    notify: Callable[[Event], None] | None = None,
    timeline: Timeline | None = None,
    **settings: Unpack[Settings],
) -> Engine:
    """Load a model with its draft sources.

    Args:
        model: A Hugging Face id, a folder, a .gguf file, "demo" or "demo-wide"; or an EngineConfig.
        plan: A plan, or the path of its file. None: the saved plan, or a new one.
        replan: Measure and plan again, even if there is a saved plan. Default False.
        at_once: Optimize for one early answer: load no draft model if the target fits in memory, `draft` was
            not given, and there is no saved plan. Default False.
        notify: Receives LoadProgress and Notice events during loading, and Prefill and PassProgress events
            from the thread that runs passes.
        timeline: Records a trace of all threads, for its `write`.
        settings: Fields of `EngineConfig`; sizes also as "1.5GB", draft sources also as a list.

    Raises:
        OffspecError: See `offspec.core.errors`; nothing stays open.
    """
    if isinstance(model, EngineConfig) and settings:
        raise TypeError(
            "settings cannot be combined with an EngineConfig: set them in it with dataclasses.replace"
        )
    config = model if isinstance(model, EngineConfig) else EngineConfig.of(model, settings)
    if not isinstance(plan, str | Path | Plan | None):
        raise RequestError(f"plan must be an offspec.Plan or the path of its file, not {short_repr(plan)}")
    named = read_plan(Path(plan)) if isinstance(plan, str | Path) else plan
    notify, timeline = notify or ignore_event, timeline or OFF
    config = choose_device(config, notify, named)
    restrict_permissions(notify)
    if (warning := spinning_warning()) is not None:
        notify(Notice(warning))
    texts = read_corpus(config.corpus)
    with timeline.span("engine", "load"):
        prepared = prepare(config, notify, timeline, named=named, replan=replan, at_once=at_once)
    suffix, codec = prepared.assembly.sources.lookups["suffix"], prepared.assembly.codec
    assert isinstance(suffix, SuffixLookup)
    for text in texts:
        suffix.add_text(codec.tokenize(text))
    end_team()  # from here on, another thread computes
    return Engine(
        prepared.config,
        prepared.assembly,
        notify,
        timeline,
        policy=prepared.policy,
        record=prepared.record,
    )
