"""A plan in sentences: where things go, why the tree has its size, and what the speed is bound by.

Of a 70B target on a 24 GB card, for example:

    Of 80 layers 5 stay in VRAM, 25 wait in RAM and 50 come from disk, spread evenly, so that slots fill
    while those between compute. Every pass moves 85.60 GB from disk at 6.50 GB/s and 130.50 GB from RAM to
    VRAM at 24.80 GB/s, the output head last: 13.2 s on the slower of the two. Rings of 3 slots in VRAM and 3
    in RAM let the link run ahead while the draft works. The least that works with this context and draft:
    1.64 GB of RAM and 6.40 GB of VRAM.

    Trees of up to 4,096 nodes at least compute while the link is busy, and cost no time. A budget of 768
    nodes gives 1.39 tok/s; 256 nodes would give 1.20 tok/s.

    The link bounds a pass: 13.2 s of streaming, in which 0.500 s of drafting and 1.20 s of computing fit. A
    pass takes 13.2 s and yields 18.4 tokens (typical of a small model, not measured): 1.39 tok/s. One token
    a pass would be 0.0758 tok/s. The first token of a prompt of 512 comes after 14.1 s; the prompt rides on
    one trip of the weights, which takes 13.2 s.
"""

import numpy as np

from offspec_planners.placement import Tier
from offspec_planners.plan import Plan
from offspec_planners.plan.forecast import best_by_budget
from offspec_planners.units import format_bytes, format_number, format_rate, format_seconds

_FREE = 1.02  # times that differ by less than this factor count as equal
_FEW = 8  # nodes that are not worth a sentence
_NEAR = 1.15  # a first token within this factor of the link time is bound by the link


def explain(plan: Plan) -> tuple[str, ...]:
    """All sentences: placement, tree, speed."""
    return *explain_placement(plan), *explain_tree(plan), *explain_speed(plan)


def explain_placement(plan: Plan) -> tuple[str, ...]:
    """Where the layers are, what crosses which link in a pass, and the least memory that would do."""
    sentences = [
        _where_layers_are(plan),
        *_which_gpus(plan),
        *_what_streams(plan),
        *_where_caches_are(plan),
    ]
    least = f"{format_bytes(plan.least_memory)} of RAM"
    if plan.least_vram is not None:
        least += (
            f" and {format_bytes(plan.least_vram)} of VRAM{' on the first GPU' if plan.more_vram else ''}"
        )
    sentences.append(f"The least that works with this context and draft: {least}.")
    return tuple(sentences)


def _where_layers_are(plan: Plan) -> str:
    tiers, count = plan.placement.tiers, len(plan.placement.tiers)
    held = [(tier, len(plan.placement.layers(tier))) for tier in Tier if tier in tiers]
    if len(held) == 1:
        verb = {Tier.DISK: "are on", Tier.CPU: "are computed by the CPU in"}.get(held[0][0], "stay in")
        return f"All {count} layers {verb} {plan.memory_name(held[0][0])}."
    words = {
        Tier.DEVICE: "stay in",
        Tier.CPU: "are computed by the CPU in",
        Tier.HOST: "wait in",
        Tier.DISK: "come from",
    }
    clauses = [f"{number} {words[tier]} {plan.memory_name(tier)}" for tier, number in held]
    listing = ", ".join(clauses[:-1]) + f" and {clauses[-1]}"
    spread = ", spread evenly, so that slots fill while those between compute" if plan.placement.slots else ""
    return f"Of {count} layers {listing}{spread}."


def _which_gpus(plan: Plan) -> list[str]:
    """How layers are divided among several GPUs."""
    placement = plan.placement
    if not plan.more_vram:
        return []
    counts = [
        sum(tier is not Tier.CPU for tier in placement.tiers_on(gpu))
        for gpu in range(1 + len(plan.more_vram))
    ]
    listing = f"{', '.join(map(str, counts[:-1]))} and {counts[-1]} layers"
    if not placement.slots or not any(tier.streams for tier in placement.tiers):
        return [f"The GPUs compute {listing}, one behind the other."]
    return [f"The GPUs compute {listing}; those that stream go to them in turn, so that all links are busy."]


def _where_caches_are(plan: Plan) -> list[str]:
    """Said only where it is not the device."""
    if plan.placement.caches is Tier.DEVICE:
        return []
    nbytes = sum(part.bytes for part in plan.parts if part.what == "caches" and part.tier == Tier.HOST)
    return [
        f"Keys and values live in RAM, {format_bytes(nbytes)} of {plan.context:,} tokens, and come to "
        f"{plan.memory_name(Tier.DEVICE)} a layer at a time in every pass; times are those of a full context."
    ]


def _what_streams(plan: Plan) -> list[str]:
    placement, machine = plan.placement, plan.hardware
    crossings = []
    if from_disk := plan.streamed(Tier.DISK):
        crossings.append(f"{format_bytes(from_disk)} from disk at {format_rate(machine.disk.value)}")
    if machine.link is not None and (copied := plan.streamed(Tier.DISK, Tier.HOST)):
        each = " to each GPU" if placement.gpu_count > 1 else ""
        crossings.append(
            f"{format_bytes(copied)} from RAM to VRAM at {format_rate(machine.link.value)}{each}"
        )
    if not crossings:
        return [] if placement.slots else ["No weights move while it decodes."]
    seconds = f"{format_seconds(plan.costs.link)}{' on the slower of the two' if len(crossings) > 1 else ''}"
    head = ", the output head last" if placement.head is not Tier.DEVICE else ""
    ring = f"A ring of {placement.slots} slots lets"
    if placement.staging:
        ring = f"Rings of {placement.slots} slots in VRAM and {placement.staging} in RAM let"
    return [
        f"Every pass moves {' and '.join(crossings)}{head}: {seconds}.",
        f"{ring} the link run ahead while the draft works.",
    ]


def explain_tree(plan: Plan) -> tuple[str, ...]:
    """How many nodes are free, and what half and twice the budget would bring."""
    if plan.draft_mode == "none":
        if plan.budget > 1:
            return ("There is no draft model, so a pass yields one token, and more where the text repeats.",)
        return ("There is no draft, so every pass yields one token.",)
    return (*_free_nodes(plan), *_other_budgets(plan))


def _free_nodes(plan: Plan) -> list[str]:
    """How many nodes cost no time because the link is busy anyway; nothing is said where none stream."""
    costs, draft = plan.costs, plan.forecast.draft_seconds
    if not costs.link:
        return []
    measured = np.arange(1, costs.compute[-1][0] + 1)
    waits = float(costs.iteration(draft, 1))
    most = int(np.sum(costs.iteration(draft, measured) <= _FREE * waits))
    if most == len(measured):
        return [f"Trees of up to {most:,} nodes at least compute while the link is busy, and cost no time."]
    if most < _FEW:
        return ["Every node costs time: computing is not hidden behind the link."]
    return [f"Up to {most:,} nodes compute while the link is busy; those beyond cost time."]


def _other_budgets(plan: Plan) -> list[str]:
    best = best_by_budget(plan.sweep)
    smaller = [choice for choice in best if choice.budget <= plan.budget // 2][-1:]
    larger = [choice for choice in best if choice.budget >= plan.budget * 2][:1]
    others = [
        f"{choice.budget:,} nodes would give {format_number(choice.tok_per_s)} tok/s"
        for choice in (*smaller, *larger)
    ]
    if not others:
        return []
    here = format_number(plan.forecast.tok_per_s)
    return [f"A budget of {plan.budget:,} nodes gives {here} tok/s; {' and '.join(others)}."]


def explain_speed(plan: Plan) -> tuple[str, ...]:
    """What a pass waits for, what it yields, and when the first token comes."""
    forecast = plan.forecast
    yields = (
        f"A pass takes {format_seconds(forecast.seconds_per_pass)} and yields "
        f"{format_number(forecast.tokens_per_pass)} tokens ({plan.acceptance}): "
        f"{format_number(forecast.tok_per_s)} tok/s."
    )
    alone = f"One token a pass would be {format_number(plan.tok_per_s_alone)} tok/s."
    first = (
        f"The first token of a prompt of {forecast.prompt_tokens:,} comes after "
        f"{format_seconds(forecast.ttft_s)}; {explain_first_token(plan)}."
    )
    return explain_bound(plan), yields, alone, first


def explain_bound(plan: Plan) -> str:
    """What the seconds of a pass are bound by."""
    forecast = plan.forecast
    draft, compute = format_seconds(forecast.draft_seconds), format_seconds(forecast.compute_seconds)
    link = format_seconds(forecast.link_seconds)
    beside = f"beside {link} of streaming" if forecast.link_seconds else "with nothing to stream"
    if forecast.bound == "compute":
        return f"Compute bounds a pass: {compute}, after {draft} of drafting, {beside}."
    if forecast.bound == "draft":
        return f"The draft bounds a pass: {draft}, before {compute} of computing, {beside}."
    if forecast.seconds_per_pass <= _FREE * forecast.link_seconds:
        return (
            f"The link bounds a pass: {link} of streaming, in which {draft} of drafting and {compute} of "
            "computing fit."
        )
    ahead = format_seconds(max(plan.costs.link - plan.costs.rest, 0.0))
    return (
        f"The link bounds a pass: of {link} of streaming, slots hold {ahead} ahead while the draft works for "
        f"{draft}; then it stands still. Computing takes {compute}."
    )


def explain_first_token(plan: Plan) -> str:
    """What the first token waits for: the prompt goes through with one trip of the weights."""
    link = plan.costs.link
    if link and plan.forecast.ttft_s <= _NEAR * link:
        return f"the prompt rides on one trip of the weights, which takes {format_seconds(link)}"
    if link:
        return f"drafting and computing take longer than the one trip of the weights, {format_seconds(link)}"
    return "it is bound by compute"
