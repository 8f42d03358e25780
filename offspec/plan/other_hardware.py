"""Plan for other hardware, from its profile and the configurations of the models."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from offspec.checkpoint.known_models import known_config
from offspec.core import memory
from offspec.core.config import AUTO, LOOKUPS, MTP, NONE, SELF_DRAFT, EngineConfig
from offspec.core.errors import CapacityError, CheckpointError, DraftError, RequestError
from offspec.draft.kinds import OF_TARGET
from offspec.draft.known_drafts import known_drafts
from offspec.draft.open import Drafts, self_draft_fingerprint
from offspec.plan.auto_draft import choose_auto_draft, is_hub_model
from offspec.plan.build_plan import Acceptance, bits_suffix, build_plan, typical_self_draft
from offspec.plan.choose_device import check_memory, check_without_gpu
from offspec.plan.fit import Fit, find_fit, self_draft_does_not_fit, try_fit
from offspec.plan.model_sizes import open_on_meta, sizes_of
from offspec.plan.needs import unpacks_weights, with_max_width
from offspec.plan.opened import OpenedModels
from offspec_planners.acceptance import typical
from offspec_planners.cost import JOINED_WIDTHS, WIDTHS, Estimate
from offspec_planners.hardware_rates import Hardware
from offspec_planners.placement import Tier
from offspec_planners.plan import Plan
from offspec_planners.search import shared_budgets
from offspec_planners.typical_acceptance import MODEL

_NODES = (1024, 256, 64)  # budgets to make room for, before the profitable one is known: the first that fits
_FREE = 0.9  # default share of a machine's RAM
_FREE_DEVICE = 0.95


def plan_for_hardware(config: EngineConfig, hardware: Hardware) -> Plan:
    """Build a plan for other hardware, from its profile alone.

    Args:
        config: Models, memory limits and settings. Draft "auto" is the one that a run there would choose, or
            none if that is faster.
        hardware: The profile.

    Raises:
        CapacityError: The model does not fit.
        CheckpointError: The model is not known, and its configuration cannot be read.
        RequestError: Settings that the machine does not support.
    """
    config, hardware = _with_device(config, hardware)
    target, fingerprint = open_on_meta(
        config.model,
        getattr(torch, config.dtype),
        torch.device(config.device.split(",")[0]),
        int8_cache=config.kv_cache == "int8",
        quantize=config.quantize,
    )
    vram = None
    if hardware.link is not None:
        vram = config.vram or int(_FREE_DEVICE * hardware.processor.memory)
    opened = OpenedModels(
        config,
        target,
        fingerprint,
        Drafts(),
        config.memory or int(_FREE * hardware.ram),
        vram,
        memory.RUNTIME,  # a process there, not this one
        config.draft,
        more_vram=(vram,) * config.device.count(",") if vram else (),
    )
    plans, failure = list[Plan](), None
    for wanted, note in _drafts(opened):
        try:
            plan = _plan(wanted, hardware)
            plans.append(replace(plan, notes=(*plan.notes, note)) if note else plan)
        except (CapacityError, CheckpointError) as error:
            failure = failure or error
    if plans:
        return max(plans, key=lambda plan: plan.forecast.tok_per_s)
    assert failure is not None
    raise failure


def _with_device(config: EngineConfig, hardware: Hardware) -> tuple[EngineConfig, Hardware]:
    """Choose the devices there, and return the profile restricted to them. Raises RequestError."""
    if config.device == "all":
        raise RequestError("a profile has no number of GPUs: name them in `device`, such as cuda:0,cuda:1")
    has_gpu, why = hardware.link is not None, f"{hardware.name} has no GPU"
    if config.device.startswith("cuda") and not has_gpu:
        raise RequestError(f"{why}; leave out `device`")
    if has_gpu and hardware.host is None:
        for asked, name in (
            (config.device == "cpu", "device"),
            (config.cpu_layers, "cpu_layers"),
            (config.experts == "cpu", "experts"),
        ):
            if asked:
                missing = f"the profile of {hardware.name} has no figures for its CPU"
                raise RequestError(f"{missing}: add a host, or leave out `{name}`")
    if config.device == "cpu" and hardware.host is not None:
        hardware, why = hardware.without_gpu(), "the plan is for the CPU, as set by `device`"
    gpus = 0 if hardware.link is None else 1 + config.device.count(",")
    if not gpus:
        check_without_gpu(config, why)
    if gpus > 1 and config.experts == "cpu":
        raise RequestError('`experts="cpu"` works with a single GPU: name one with `device`')
    check_memory(config, hardware.name, hardware.ram, hardware.processor.memory if gpus else None)
    device = config.device if gpus > 1 else "cuda" if gpus else "cpu"
    return replace(config, device=device), hardware


def _drafts(opened: OpenedModels) -> list[tuple[OpenedModels, str]]:
    """Return no draft and the one that a run would choose, each with a note; ties go to the first."""
    config = opened.config
    if config.draft != AUTO:
        return [(replace(opened, drafts=_imagined(config.drafts, opened)), "")]

    def imagined(name: str) -> Drafts:
        if name != SELF_DRAFT and known_config(name) is None:
            raise DraftError(f"planning with {name} requires its files")
        return _imagined((name,), opened)

    known = known_drafts(config.model, opened.target.skeleton.config.to_dict())
    choice, tried = choose_auto_draft(opened, known, imagined, lambda name: name == MTP, fetches=True)
    main, line = choice.names[0], choice.line
    note = f"{line[0].upper()}{line[1:]}." if line else ""
    if main not in (SELF_DRAFT, *LOOKUPS) and not is_hub_model(config.model):
        note += f' A run of a local model downloads it only with `draft="{main}"`.'
    alone = replace(opened, config=replace(config, draft=NONE), draft_option=NONE)
    if main not in tried:
        return [(alone, note)]
    found = replace(tried[main], config=replace(config, draft=main), draft_option=main)
    return [(alone, ""), (found, note)]


def _plan(opened: OpenedModels, hardware: Hardware) -> Plan:
    config, target, drafts = opened.config, opened.target, opened.drafts
    opened, room, fit = _held(opened)
    notes = list[str]()
    if drafts.names and fit.draft_mode == "none":
        notes.append(f"The draft {config.draft} is left out, since {self_draft_does_not_fit(opened, room)}.")
        opened = opened.alone()
    draft = opened.draft
    sizes = sizes_of(draft, opened.drafts.main) if draft else None
    packed = fit.draft_bits if fit.draft_mode == "packed" else None
    unpacking = draft is not None and packed is not None and unpacks_weights(draft, packed)
    widths = WIDTHS if config.min_sequences == 1 else JOINED_WIDTHS
    pricing = Estimate(hardware, sizes, packed, unpacks=unpacking, widths=widths)
    if fit.placement.caches is Tier.HOST:  # a context that fits nowhere else is read completely
        pricing = replace(pricing, prefix=fit.context)
    acceptance = typical_self_draft(fit.draft_bits)
    if sizes is not None and not config.uses_self_draft:
        share = sizes.parameters / sizes_of(target, config.model).parameters
        kind = f"a draft with {100 * share:.2g} % of the target's weights{bits_suffix(fit.draft_bits)}"
        acceptance = Acceptance(typical(MODEL, share, fit.draft_bits), f"typical of {kind}, not measured")
    plan = build_plan(opened, room, pricing, acceptance, hardware)
    return replace(plan, notes=(*plan.notes, *notes))


def _imagined(sources: Sequence[str], opened: OpenedModels) -> Drafts:
    """Describe drafts by their configurations alone. Raises RequestError if that is not enough."""
    target = opened.target
    names = tuple(name for name in sources if name not in (NONE, *LOOKUPS))
    if not names:
        return Drafts()
    if len(names) > 1 or names[0] in OF_TARGET:
        raise RequestError("a plan for other hardware takes one draft: a model, or `self`")
    if names[0] == SELF_DRAFT:
        return Drafts(names, target, self_draft_fingerprint(opened.target_fingerprint))
    return Drafts(names, *open_on_meta(names[0], target.dtype, target.device))


def _held(opened: OpenedModels) -> tuple[OpenedModels, EngineConfig, Fit]:
    """Return the models, their settings with room for the largest trees, and their fit.

    A draft that does not fit with these trees as stored may fit with smaller ones, as in a run, and a named
    draft may fit quantized to 4 bits. Raises CapacityError.
    """
    config, sequences = opened.config, opened.config.min_sequences
    most, *fewer = [config.budget] if config.budget else [max(nodes, sequences) for nodes in _NODES]
    room = with_max_width(replace(config, budget=most))
    try:
        fit = find_fit(opened, room)
    except CapacityError:
        if opened.draft is None or config.uses_self_draft or config.draft_bits is not None:
            raise
    else:
        for budget in () if config.budget else shared_budgets(sequences):
            larger = replace(room, budget=budget)
            if (found := try_fit(opened, larger)) is not None and found.draft_storage == fit.draft_storage:
                return opened, larger, fit  # it leaves the memory to the draft
        return opened, room, fit
    for budget in fewer:
        smaller = replace(room, budget=budget)
        if (found := try_fit(opened, smaller)) is not None:
            return opened, smaller, found
    room, config = replace(room, draft_bits=4), replace(config, draft_bits=4)
    return replace(opened, config=config), room, find_fit(opened, room)
