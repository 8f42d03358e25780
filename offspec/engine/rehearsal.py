"""Plans: for this machine, measured on the models themselves, or for another machine."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from offspec.checkpoint.hub_name import hub_name
from offspec.checkpoint.open import config_alone
from offspec.core import memory
from offspec.core.config import NONE, EngineConfig, SamplingParams
from offspec.core.errors import ModelNotFoundError, RequestError
from offspec.core.events import LoadProgress, Notice, PassStats, unheard
from offspec.draft.open import Notify
from offspec.engine.engine import Engine
from offspec.plan import records as ledger
from offspec.plan.choose_device import choose_device
from offspec.plan.hardware_profile import profile
from offspec.plan.initial_fit import fit_of_plan
from offspec.plan.load import open_models
from offspec.plan.make import plan_by
from offspec.plan.other_hardware import plan_for_hardware
from offspec.plan.policy import DraftPolicy
from offspec.plan.prepare import Prepared, plan_key, prepare
from offspec.plan.prompts import REHEARSAL
from offspec_planners.hardware_rates import Hardware
from offspec_planners.plan import Plan
from offspec_planners.tree_growth import Grown

_PASSES_EACH, _TREES_EACH = 4, 3  # of each prompt
_PASSES_SEEN = 7  # of each, where trees can be recorded in passes alone
_SECONDS = 40.0  # that the passes of a rehearsal take, and that its previews take; the last prompt's aside


def make_plan(
    config: EngineConfig,
    *,
    hardware: Hardware | None = None,
    replan: bool = False,
    notify: Notify | None = None,
) -> Plan:
    """A plan for running a target with a draft: the saved one if it still fits, else a new one.

    Without `hardware` the models are loaded and measured: passes, draft steps, and, once for each pair of
    models, the acceptance of the draft.

    Args:
        config: Models, memory limits and settings.
        hardware: Another machine. None: this one. Of the models a config.json is enough; without weights to
            measure, this machine's profile is planned with.
        replan: Measure again, even if there is a saved plan. Default False.
        notify: Takes LoadProgress and Notice events.

    Raises:
        OffspecError: See `offspec.core.errors`.
    """
    notify = notify or unheard
    if hardware is not None:
        return plan_for_hardware(config, hardware)
    config = choose_device(config, notify)
    if config_alone(config.model) is not None:
        return _plan_without_weights(config, notify)
    try:
        if not replan and (kept := _kept(config, notify)) is not None:
            return kept
        with rehearsed(config, notify) as rehearsal:
            return rehearsal.plan
    except ModelNotFoundError as error:
        if not hub_name(config.model):
            raise
        raise ModelNotFoundError(
            f"{error}; to plan without its weights, add `hardware=NAME` (for this machine a profile that "
            "`offspec hardware --json > here.json` makes)"
        ) from error


def _plan_without_weights(config: EngineConfig, notify: Notify) -> Plan:
    notify(Notice("there are no weights to measure: this is planned from the machine's profile alone"))
    hardware = profile(config.device, notify).hardware
    limit = config.memory or min(memory.usable_bytes(), hardware.ram)
    return plan_for_hardware(replace(config, memory=limit), hardware)


def _kept(config: EngineConfig, notify: Notify) -> Plan | None:
    """The plan of an earlier run, where it still fits and the draft's guesses were measured for it."""
    opened = open_models(config, notify)
    try:
        plan = ledger.load_plan(plan_key(opened))
        if plan is None or not _is_measured(plan):
            return None
        found = fit_of_plan(plan, opened, notify)
        return plan if found is not None else None
    finally:
        opened.close()


def _is_measured(plan: Plan) -> bool:
    return plan.draft_mode == NONE or plan.measured


class Rehearsal:
    """A loaded engine and the plan that was made by measuring it."""

    def __init__(self, engine: Engine, prepared: Prepared, plan: Plan) -> None:
        self.engine, self.prepared, self.plan = engine, prepared, plan

    def answer(self, notify: Notify) -> None:
        """Learn how sure the draft may be from some real passes, then how its trees grow from previews."""
        stage, total = "Rehearsing answers", 2 * len(REHEARSAL)
        temperature = self.prepared.config.temperature
        asked = [
            (prompt, SamplingParams(temperature, seed=number, max_tokens=256))
            for number, prompt in enumerate(REHEARSAL)
        ]
        passes = _PASSES_SEEN if self.prepared.record.kind == "head" else _PASSES_EACH
        began = time.perf_counter()
        for done, (prompt, params) in enumerate(asked):
            notify(LoadProgress(stage, done, total, "steps"))
            with suppress(RequestError):  # too long for a small context
                answer_passes(self.engine, prompt, params, passes)
            if time.perf_counter() - began > _SECONDS:
                break
        forest, began = list[Grown](), time.perf_counter()
        for done, (prompt, params) in enumerate(asked):
            notify(LoadProgress(stage, len(REHEARSAL) + done, total, "steps"))
            with suppress(RequestError):
                forest += self.engine.preview(prompt, params, trees=_TREES_EACH)
            if time.perf_counter() - began > _SECONDS:
                break
        known = self.prepared.record.entry(temperature, self.prepared.config.verify == "coupled")
        known.forest = forest or known.forest

    def plan_again(self) -> None:
        """Choose once more, by what is known now, and keep that plan."""
        prepared = self.prepared
        assert prepared.measured is not None
        self.plan = plan_by(prepared.opened, prepared.config, prepared.measured, prepared.record)
        ledger.save_plan(plan_key(prepared.opened), self.plan)
        self.engine.follow(DraftPolicy.planned(self.plan, prepared.config, prepared.record))


def answer_passes(
    engine: Engine, prompt: str, params: SamplingParams, count: int
) -> list[tuple[float, PassStats]]:
    """Time and figures of the first passes of an answer, which is then cancelled."""
    events, found = engine.stream(prompt, params), list[tuple[float, PassStats]]()
    try:
        for event in events:
            if isinstance(event, PassStats):
                found.append((time.perf_counter(), event))
                if len(found) == count:
                    break
    finally:
        events.close()
    return found


@contextmanager
def rehearsed(config: EngineConfig, notify: Notify) -> Iterator[Rehearsal]:
    """Load, measure, rehearse answers where nothing is on record of the draft, and plan."""
    prepared = prepare(replace(config, cache_size=0), notify, replan=True)
    with Engine(
        prepared.config,
        prepared.assembly,
        notify,
        policy=replace(prepared.policy, rests=False),
        record=prepared.record,
    ) as engine:
        assert prepared.policy.plan is not None
        engine.use(prepared.main)  # what lookups bring depends on the text, and is not planned with
        rehearsal = Rehearsal(engine, prepared, prepared.policy.plan)
        if not _is_measured(rehearsal.plan):
            rehearsal.answer(notify)
            rehearsal.plan_again()
        yield rehearsal
