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

from offspec_planners.cost import PROMPT_ROWS
from offspec_planners.placement import Tier
from offspec_planners.plan import Plan
from offspec_planners.plan.forecast import best_by_budget, knee
from offspec_planners.units import format_bytes, format_count, format_number, format_rate, format_seconds

_FREE = 1.02  # times that differ by less than this factor count as equal
_SEVERAL = 16  # rows that a pass of one is compared with
_FEW = 8  # nodes that are not worth a sentence
_NEAR = 1.15  # a first token within this factor of the link time is bound by the link


def explain(plan: Plan) -> tuple[str, ...]:
    """All sentences: placement, tree, speed, and what sequences share."""
    return *explain_placement(plan), *explain_tree(plan), *explain_speed(plan), *explain_shared(plan)


def explain_placement(plan: Plan) -> tuple[str, ...]:
    """Where the layers are, what crosses which link in a pass, and the least memory that would do."""
    sentences = [
        _where_layers_are(plan),
        *_which_gpus(plan),
        *_what_streams(plan),
        *_where_experts_are(plan),
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


def _where_experts_are(plan: Plan) -> list[str]:
    """How many each memory has, and what a pass of one row misses of those that it asks for."""
    experts, placement = plan.costs.experts, plan.placement
    if experts is None:
        return []
    count = experts.count * experts.layers
    near = f"{placement.expert_slots:,} have room in {plan.memory_name(Tier.DEVICE)}"
    come = "a router's choice is read, or copied, where it is not there"
    if placement.cpu_experts:
        near = f"{placement.host_expert_slots:,} have room in {plan.memory_name(Tier.HOST)}"
        come = "the CPU computes a router's choice, and reads what is not there"
    elif placement.host_expert_slots:
        near += f" and {placement.host_expert_slots:,} in {plan.memory_name(Tier.HOST)}"
    asked, hit = experts.layers * float(experts.union(1)), float(experts.hit_rate(1))
    several = experts.layers * float(experts.union(_SEVERAL))
    return [
        f"Of {count:,} experts {near}; {come}.",
        f"A row asks for {asked:,.0f} of them, {hit:.0%} of which are expected to be there already; "
        f"{_SEVERAL} rows together ask for {several:,.0f}.",
    ]


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
        return [] if placement.slots or placement.by_need else ["No weights move while it decodes."]
    seconds = f"{format_seconds(plan.costs.link)}{' on the slower of the two' if len(crossings) > 1 else ''}"
    head = ", the output head last" if placement.head is not Tier.DEVICE else ""
    ring = f"A ring of {format_count(placement.slots, 'slot')} lets"
    if placement.staging:
        ring = f"Rings of {placement.slots} slots in VRAM and {placement.staging} in RAM let"
    return [
        f"Every pass moves {' and '.join(crossings)}{head}: {seconds}.",
        f"{ring} the link run ahead while the draft works.",
    ]


def explain_tree(plan: Plan) -> tuple[str, ...]:
    """How many nodes are free, and what half and twice the budget would bring."""
    if plan.draft_mode == "none":
        each = " of each sequence" if plan.sequences > 1 else ""
        if plan.budget > plan.sequences:
            more = "and more where the text repeats"
            return (f"There is no draft model, so a pass yields one token{each}, {more}.",)
        return (f"There is no draft, so every pass yields one token{each}.",)
    return (*_free_nodes(plan), *_other_budgets(plan))


def _free_nodes(plan: Plan) -> list[str]:
    """How many nodes cost no time because the link is busy anyway; nothing is said where none stream."""
    costs, draft = plan.costs.for_sequences(plan.sequences), plan.forecast.draft_seconds
    if not costs.link or costs.experts is not None:
        return []
    measured = np.arange(1, costs.compute[-1][0] + 1)
    waits = float(costs.iteration(draft, plan.sequences))
    most = int(np.sum(costs.iteration(draft, measured) <= _FREE * waits))
    if most == len(measured):
        nodes = f"{most:,} nodes{' in all' if plan.sequences > 1 else ''}"
        return [f"Trees of up to {nodes} at least compute while the link is busy, and cost no time."]
    if most < _FEW:
        return ["Every node costs time: computing is not hidden behind the link."]
    return [f"Up to {most:,} nodes compute while the link is busy; those beyond cost time."]


def _other_budgets(plan: Plan) -> list[str]:
    best = best_by_budget(plan.sweep)
    smaller = [choice for choice in best if choice.budget <= plan.budget // 2][-1:]
    larger = [choice for choice in best if choice.budget >= plan.budget * 2][:1]
    others = [
        f"{format_count(choice.budget, 'node')} would give {format_number(choice.tok_per_s)} tok/s"
        for choice in (*smaller, *larger)
    ]
    if not others:
        return []
    here = format_number(plan.forecast.tok_per_s)
    return [f"A budget of {format_count(plan.budget, 'node')} gives {here} tok/s; {' and '.join(others)}."]


def explain_speed(plan: Plan) -> tuple[str, ...]:
    """What a pass waits for, what it yields, and when the first token comes."""
    forecast = plan.forecast
    yields = (
        f"A pass takes {format_seconds(forecast.seconds_per_pass)} and yields "
        f"{format_number(forecast.tokens_per_pass)} tokens ({plan.acceptance}): "
        f"{explain_rate(plan)}."
    )
    alone = f"One token a pass would be {format_number(plan.tok_per_s_alone)} tok/s."
    if plan.sequences > 1:
        alone = f"One token of each a pass would be {format_number(plan.tok_per_s_alone)} tok/s."
    first = (
        f"The first token of a prompt of {forecast.prompt_tokens:,} comes after "
        f"{format_seconds(forecast.ttft_s)}; {explain_first_token(plan)}."
    )
    return explain_bound(plan), yields, alone, first


def explain_rate(plan: Plan) -> str:
    """Tokens per second, of several sequences in all and each."""
    rate = f"{format_number(plan.forecast.tok_per_s)} tok/s"
    if plan.sequences == 1:
        return rate
    each = format_number(plan.forecast.tok_per_s / plan.sequences)
    return f"{rate} in all, {each} for each of {plan.sequences} sequences"


def explain_shared(plan: Plan) -> tuple[str, ...]:
    """Up to which number sequences cost each other little, and what a prompt takes from them."""
    if not plan.shared:
        return ()
    costs, draft = plan.costs.for_sequences(plan.sequences), plan.forecast.draft_seconds
    longer = float(costs.iteration(draft, plan.budget + PROMPT_ROWS))
    chunk = (
        f"Prompts are read in chunks of {PROMPT_ROWS:,} tokens beside the trees of the others, whose pass "
        f"then takes {format_seconds(longer)}."
    )
    room = "Twice as many do not fit with this context and draft."
    return _knee(plan), *([room] if plan.shared[-1].sequences < 2 * plan.sequences else []), chunk


def _knee(plan: Plan) -> str:
    """From which number of sequences on they take time from each other, and by what."""
    found = knee(plan.shared)
    if found is None:
        return "Twice as many sequences bring at least half as much again, up to the last of these numbers."
    before = next(row for row in plan.shared if row.sequences == found)
    after = plan.shared[plan.shared.index(before) + 1]
    longer = after.seconds_per_pass - before.seconds_per_pass
    if 2 * (after.link_seconds - before.link_seconds) < longer:
        why = "all of them are drafted and computed for in a pass"
    elif plan.costs.experts is not None:
        why = "each asks for experts of its own, which have to come"
    else:
        why = "caches take the place of layers, and more streams"
    many = format_count(found, "sequence")
    return f"From {many} on, twice as many bring less than half as much again: {why}."


def explain_bound(plan: Plan) -> str:
    """What the seconds of a pass are bound by."""
    forecast = plan.forecast
    draft, compute = format_seconds(forecast.draft_seconds), format_seconds(forecast.compute_seconds)
    link = format_seconds(forecast.link_seconds)
    beside = f"beside {link} of streaming" if forecast.link_seconds else "with nothing to stream"
    if forecast.bound == "compute":
        return f"Compute bounds a pass: {compute}, after {draft} of drafting, {beside}."
    if forecast.bound == "link" and plan.costs.experts is not None:
        return (
            f"Experts that are not in memory bound a pass: they take {link} to come, beside {draft} of "
            f"drafting and {compute} of computing."
        )
    if forecast.bound == "draft":
        return f"The draft bounds a pass: {draft}, before {compute} of computing, {beside}."
    if forecast.seconds_per_pass <= _FREE * forecast.link_seconds:
        return (
            f"The link bounds a pass: {link} of streaming, in which {draft} of drafting and {compute} of "
            "computing fit."
        )
    ahead = format_seconds(max(plan.costs.link - plan.costs.rest, 0.0))
    hidden = forecast.draft_seconds * (1.0 - float(plan.costs.unhidden(plan.budget)))
    some = f", {format_seconds(hidden)} of them beside the pass before" if hidden else ""
    return (
        f"The link bounds a pass: of {link} of streaming, slots hold {ahead} ahead while the draft works for "
        f"{draft}{some}; then it stands still. Computing takes {compute}."
    )


def explain_first_token(plan: Plan) -> str:
    """What the first token waits for: the prompt goes through with one trip of the weights."""
    if plan.sequences > 1:
        return "it waits for a pass of the others, and shares the next"
    link = float(plan.costs.link_seconds(plan.forecast.prompt_tokens))
    if plan.costs.experts is not None:
        return f"the experts that the prompt asks for take {format_seconds(link)} to come"
    if link and plan.forecast.ttft_s <= _NEAR * link:
        return f"the prompt rides on one trip of the weights, which takes {format_seconds(link)}"
    if link:
        return f"drafting and computing take longer than the one trip of the weights, {format_seconds(link)}"
    return "it is bound by compute"
