"""A plan for a machine that is elsewhere: from its profile, and from the configurations of the models."""

from dataclasses import replace

import torch

from offspec import memory
from offspec.assemble import Opened, draft_print
from offspec.config import EngineConfig
from offspec.draw_up import make_plan, typical_substitute
from offspec.errors import CapacityError, CheckpointError, RequestError
from offspec.fit import WIDEST, Fit
from offspec.model.loaded import LoadedModel
from offspec.outline import imagine, sizes_of
from offspec_planners.calibrate import typical
from offspec_planners.cost import Estimate
from offspec_planners.hardware import Hardware
from offspec_planners.plan import Plan

_MOST_NODES = 1024
_FREE = 0.9  # of a machine's RAM, where nobody says how much may be used
_FREE_DEVICE = 0.95
# Small siblings of well-known targets, the largest first.
_SIBLINGS = (
    ("meta-llama/Llama-3", ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct")),
    ("meta-llama/Llama-2", ("meta-llama/Llama-2-7b-chat-hf",)),
    (
        "Qwen/Qwen2.5",
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
    ),
    ("Qwen/Qwen3", ("Qwen/Qwen3-8B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.6B")),
)


def plan_elsewhere(config: EngineConfig, hardware: Hardware) -> Plan:
    """The plan for a machine known by its profile alone.

    draft "auto" stands for the fastest of what fits: a substitute, or a small sibling of a well-known target.
    Raises CapacityError, CheckpointError, RequestError.
    """
    if config.device == "cuda" and hardware.link is None:
        raise RequestError(f"{hardware.name} has no GPU; leave out --device")
    config = replace(config, device="cpu" if hardware.link is None else "cuda")
    target, fingerprint = imagine(config.model, getattr(torch, config.dtype), torch.device(config.device))
    plans, failure = list[Plan](), None
    for wanted in _drafts(config):
        try:
            plans.append(_plan(wanted, hardware, target, fingerprint))
        except (CapacityError, CheckpointError) as error:
            failure = failure or error
    if plans:
        return max(plans, key=lambda plan: plan.forecast.tok_per_s)
    assert failure is not None
    raise failure


def _drafts(config: EngineConfig) -> list[EngineConfig]:
    """What might draft, and nobody. Of what is equally fast the first is taken."""
    if config.draft != "auto":
        return [config]
    names = ["none", "auto"]
    for family, siblings in _SIBLINGS:
        if config.model.startswith(family):
            names += siblings[siblings.index(config.model) + 1 :] if config.model in siblings else siblings
    return [replace(config, draft=name) for name in names]


def _plan(config: EngineConfig, hardware: Hardware, target: LoadedModel, fingerprint: str) -> Plan:
    draft, known = None, "none"
    if config.draft == "auto":
        draft, known = target, draft_print(config, fingerprint)
    elif config.draft != "none":
        draft, known = imagine(config.draft, target.dtype, target.device)
        known = draft_print(config, known)
    vram = None
    if hardware.link is not None:
        vram = config.vram or int(_FREE_DEVICE * hardware.processor.memory)
    opened = Opened(
        config,
        target,
        fingerprint,
        draft,
        known,
        config.memory or int(_FREE * hardware.ram),
        vram,
        memory.RUNTIME,  # a process there, not this one
    )
    opened, room, fit = _held(opened)
    if fit.draft_mode == "none":
        draft = None
        opened = replace(opened, draft=None, draft_print="none")
    sizes = sizes_of(draft, config.draft) if draft else None
    pricing = Estimate(hardware, sizes, fit.draft_bits if fit.draft_mode == "packed" else None)
    calibration, origin = typical_substitute(fit.draft_bits)
    if sizes is not None and config.draft != "auto":
        share = sizes.parameters / sizes_of(target, config.model).parameters
        calibration = typical("model", share)
        origin = f"typical of a draft with {100 * share:.2g} % of the target's weights, not measured"
    return make_plan(opened, room, pricing, calibration, origin, hardware)


def _held(opened: Opened) -> tuple[Opened, EngineConfig, Fit]:
    """With room for the largest trees: what was opened, its settings, and what fits where.

    A named draft that does not fit as it is stored may fit rounded to 4 bits. Raises CapacityError.
    """
    config = opened.config
    room = replace(config, budget=config.budget or _MOST_NODES, width=config.width or WIDEST)
    try:
        return opened, room, opened.fit(room)
    except CapacityError:
        if opened.draft is None or config.draft == "auto" or config.draft_bits is not None:
            raise
    room, config = replace(room, draft_bits=4), replace(config, draft_bits=4)
    return replace(opened, config=config), room, opened.fit(room)
