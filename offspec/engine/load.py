"""From settings to an engine: what `offspec.load` does."""

from collections.abc import Callable
from pathlib import Path
from typing import Unpack

from offspec.core.config import EngineConfig, Settings
from offspec.core.errors import RequestError
from offspec.core.events import Event, Notice, unheard
from offspec.core.openmp import end_team, unlimited_spinning
from offspec.core.private import tighten
from offspec.core.trace import OFF, Timeline
from offspec.core.values import shown
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
    """Open a model and everything it needs to answer.

    Args:
        model: A hub id, a folder, a .gguf file, "demo" or "demo-wide"; or a whole configuration.
        plan: A plan to follow, or its file. None: the one of an earlier run, or a new one.
        replan: Measure and plan again, even if there is a saved plan. Default False.
        at_once: Answer one prompt soon: no draft model if all of the target fits in memory, the draft was not
            named, and no plan was made. Default False.
        notify: Takes LoadProgress and Notice events now, and Prefill and PassProgress ones from the thread
            that answers.
        timeline: Records what runs when, for its `write`.
        settings: Every field of `EngineConfig`, sizes also as "1.5GB", draft sources also one by one.

    Raises:
        OffspecError: See `offspec.core.errors`; nothing stays open.
    """
    if isinstance(model, EngineConfig) and settings:
        raise TypeError("settings beside an EngineConfig: give them in it, with dataclasses.replace")
    config = model if isinstance(model, EngineConfig) else EngineConfig.of(model, settings)
    if not isinstance(plan, str | Path | Plan | None):
        raise RequestError(f"plan must be an offspec.Plan or the path of its file, not {shown(plan)}")
    named = read_plan(Path(plan)) if isinstance(plan, str | Path) else plan
    notify, timeline = notify or unheard, timeline or OFF
    config = choose_device(config, notify, named)
    tighten(notify)
    if (told := unlimited_spinning()) is not None:
        notify(Notice(told))
    texts = read_corpus(config.corpus)
    with timeline.span("engine", "load"):
        prepared = prepare(config, notify, timeline, named=named, replan=replan, at_once=at_once)
    suffix, codec = prepared.assembly.sources.lookups["suffix"], prepared.assembly.codec
    assert isinstance(suffix, SuffixLookup)
    for text in texts:
        suffix.add_text(codec.tokenize(text))
    end_team()  # from here on another thread computes
    return Engine(
        prepared.config,
        prepared.assembly,
        notify,
        timeline,
        policy=prepared.policy,
        record=prepared.record,
    )
