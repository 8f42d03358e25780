"""Planning: measure the models on this machine, or plan for another machine."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from offspec.checkpoint.hub_name import hub_name
from offspec.checkpoint.open import config_only
from offspec.core import memory
from offspec.core.config import NONE, EngineConfig, SamplingParams
from offspec.core.errors import ModelNotFoundError, RequestError
from offspec.core.events import LoadProgress, Notice, PassStats, ignore_event
from offspec.draft.open import Notify
from offspec.engine.engine import Engine
from offspec.plan import records
from offspec.plan.build_plan import plan_from_measurements
from offspec.plan.calibration_prompts import CALIBRATION
from offspec.plan.choose_device import choose_device
from offspec.plan.hardware_profile import profile
from offspec.plan.initial_fit import fit_from_plan
from offspec.plan.load import open_models
from offspec.plan.other_hardware import plan_for_hardware
from offspec.plan.policy import DraftPolicy
from offspec.plan.prepare import Prepared, plan_key, prepare
from offspec_planners.hardware_rates import Hardware
from offspec_planners.plan import Plan
from offspec_planners.tree_growth import RecordedTree

_PASSES_EACH, _TREES_EACH = 4, 3  # per prompt
_PASSES_SEEN = 7  # per prompt, if trees can only be recorded in passes
_SECONDS = 40.0  # limit for the passes and for the previews each; the last prompt may exceed it


def make_plan(
    config: EngineConfig,
    *,
    hardware: Hardware | None = None,
    replan: bool = False,
    notify: Notify | None = None,
) -> Plan:
    """Return a plan for running a target with a draft: the saved plan if it still fits, else a new one.

    Without `hardware`, the models are loaded and measured: passes, draft steps and, once per pair of models,
    the acceptance rate of the draft.

    Args:
        config: Models, memory limits and settings.
        hardware: Another machine to plan for; a config.json of each model is enough. None: this machine. If
            there are no weights to measure, its hardware profile is used.
        replan: Measure again, even if there is a saved plan. Default False.
        notify: Receives LoadProgress and Notice events.

    Raises:
        OffspecError: See `offspec.core.errors`.
    """
    notify = notify or ignore_event
    if hardware is not None:
        return plan_for_hardware(config, hardware)
    config = choose_device(config, notify)
    if config_only(config.model) is not None:
        return _plan_without_weights(config, notify)
    try:
        if not replan and (kept := _kept(config, notify)) is not None:
            return kept
        with calibration_run(config, notify) as calibrated:
            return calibrated.plan
    except ModelNotFoundError as error:
        if not hub_name(config.model):
            raise
        raise ModelNotFoundError(
            f"{error}; to plan without its weights, add `hardware=NAME` (for this machine, a profile made by "
            "`offspec hardware --json > here.json`)"
        ) from error


def _plan_without_weights(config: EngineConfig, notify: Notify) -> Plan:
    notify(Notice("no weights to measure: planning from the machine's hardware profile only"))
    hardware = profile(config.device, notify).hardware
    limit = config.memory or min(memory.usable_bytes(), hardware.ram)
    return plan_for_hardware(replace(config, memory=limit), hardware)


def _kept(config: EngineConfig, notify: Notify) -> Plan | None:
    """Return the plan of an earlier run if it still fits and its acceptance rate was measured, else None."""
    opened = open_models(config, notify)
    try:
        plan = records.load_plan(plan_key(opened))
        if plan is None or not _is_measured(plan):
            return None
        found = fit_from_plan(plan, opened, notify)
        return plan if found is not None else None
    finally:
        opened.close()


def _is_measured(plan: Plan) -> bool:
    return plan.draft_mode == NONE or plan.measured


class CalibrationRun:
    """A loaded engine and the plan made from its measurements."""

    def __init__(self, engine: Engine, prepared: Prepared, plan: Plan) -> None:
        self.engine, self.prepared, self.plan = engine, prepared, plan

    def calibrate(self, notify: Notify) -> None:
        """Calibrate the draft's scores with some real passes, then record trees of previewed answers."""
        stage, total = "Calibrating the draft", 2 * len(CALIBRATION)
        temperature = self.prepared.config.temperature
        requests = [
            (prompt, SamplingParams(temperature, seed=number, max_tokens=256))
            for number, prompt in enumerate(CALIBRATION)
        ]
        passes = _PASSES_SEEN if self.prepared.record.kind == "head" else _PASSES_EACH
        began = time.perf_counter()
        for done, (prompt, params) in enumerate(requests):
            notify(LoadProgress(stage, done, total, "steps"))
            with suppress(RequestError):  # too long for a small context
                answer_passes(self.engine, prompt, params, passes)
            if time.perf_counter() - began > _SECONDS:
                break
        forest, began = list[RecordedTree](), time.perf_counter()
        for done, (prompt, params) in enumerate(requests):
            notify(LoadProgress(stage, len(CALIBRATION) + done, total, "steps"))
            with suppress(RequestError):
                forest += self.engine.preview(prompt, params, trees=_TREES_EACH)
            if time.perf_counter() - began > _SECONDS:
                break
        known = self.prepared.record.entry(temperature, self.prepared.config.verify == "coupled")
        known.forest = forest or known.forest

    def replan(self) -> None:
        """Make the plan again with the calibrated acceptance rate, save it and use it."""
        prepared = self.prepared
        assert prepared.measured is not None
        self.plan = plan_from_measurements(
            prepared.opened, prepared.config, prepared.measured, prepared.record
        )
        records.save_plan(plan_key(prepared.opened), self.plan)
        self.engine.set_draft_policy(DraftPolicy.planned(self.plan, prepared.config, prepared.record))


def answer_passes(
    engine: Engine, prompt: str, params: SamplingParams, count: int
) -> list[tuple[float, PassStats]]:
    """Return time and statistics of the first `count` passes of an answer, then cancel the answer."""
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
def calibration_run(config: EngineConfig, notify: Notify) -> Iterator[CalibrationRun]:
    """Load, measure, generate calibration answers if none are recorded for the draft, and plan."""
    prepared = prepare(replace(config, cache_size=0), notify, replan=True)
    with Engine(
        prepared.config,
        prepared.assembly,
        notify,
        policy=replace(prepared.policy, may_pause=False),
        record=prepared.record,
    ) as engine:
        assert prepared.policy.plan is not None
        engine.use(prepared.main)  # the plan ignores lookups: their acceptance depends on the text
        run = CalibrationRun(engine, prepared, prepared.policy.plan)
        if not _is_measured(run.plan):
            run.calibrate(notify)
            run.replan()
        yield run
