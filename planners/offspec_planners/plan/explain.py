"""Explanation of a plan in sentences: placement, the reason for the tree size, and the bottleneck.

For example, for a 70B target on a 24 GB card:

    Of 80 layers, 5 stay in VRAM, 25 are copied from RAM and 50 are read from disk, spread evenly so that
    slots refill while other layers compute. Every pass moves 85.60 GB from disk at 6.50 GB/s and 130.50 GB
    from RAM to VRAM at 24.80 GB/s, the output head last: 13.2 s on the slower link. Streaming buffers of 3
    slots in VRAM and 3 in RAM let the link run ahead during drafting. Minimum for this context and draft:
    1.64 GB of RAM and 6.40 GB of VRAM.

    Trees of at least 4,096 nodes compute while the link is busy and cost no time. A tree size of 768 nodes
    gives 1.39 tok/s; 256 nodes would give 1.20 tok/s.

    Transfer-bound: 13.2 s of streaming, which overlaps 0.500 s of drafting and 1.20 s of computing. A pass
    takes 13.2 s and yields 18.4 tokens (typical of a small model, not measured): 1.39 tok/s. One token per
    pass would be 0.0758 tok/s. The first token of a prompt of 512 tokens comes after 14.1 s; the prompt is
    processed in one weight transfer of 13.2 s.
"""

import numpy as np

from offspec_planners.cost import PROMPT_ROWS
from offspec_planners.placement import Tier
from offspec_planners.plan import Plan
from offspec_planners.plan.forecast import best_by_budget, knee
from offspec_planners.units import format_bytes, format_count, format_number, format_rate, format_seconds

_FREE = 1.02  # times within this factor count as equal
_SEVERAL = 16  # rows compared with a pass of one row
_FEW = 8  # fewer free nodes are reported as none
_NEAR = 1.15  # a first token within this factor of the link time is transfer-bound


def explain(plan: Plan) -> tuple[str, ...]:
    """Return all sentences: placement, tree, speed, and shared passes."""
    return *explain_placement(plan), *explain_tree(plan), *explain_speed(plan), *explain_shared(plan)


def explain_placement(plan: Plan) -> tuple[str, ...]:
    """Explain the placement of layers, the transfers in a pass, and the minimum memory."""
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
    sentences.append(f"Minimum for this context and draft: {least}.")
    return tuple(sentences)


def _where_layers_are(plan: Plan) -> str:
    tiers, count = plan.placement.tiers, len(plan.placement.tiers)
    held = [(tier, len(plan.placement.layers(tier))) for tier in Tier if tier in tiers]
    if len(held) == 1:
        verb = {Tier.DISK: "are read from", Tier.CPU: "are computed by the CPU in"}.get(held[0][0], "stay in")
        return f"All {count} layers {verb} {plan.memory_name(held[0][0])}."
    words = {
        Tier.DEVICE: "stay in",
        Tier.CPU: "are computed by the CPU in",
        Tier.HOST: "are copied from",
        Tier.DISK: "are read from",
    }
    clauses = [f"{number} {words[tier]} {plan.memory_name(tier)}" for tier, number in held]
    listing = ", ".join(clauses[:-1]) + f" and {clauses[-1]}"
    spread = ", spread evenly so that slots refill while other layers compute" if plan.placement.slots else ""
    return f"Of {count} layers, {listing}{spread}."


def _which_gpus(plan: Plan) -> list[str]:
    """Explain the division of layers among several GPUs."""
    placement = plan.placement
    if not plan.more_vram:
        return []
    counts = [
        sum(tier is not Tier.CPU for tier in placement.tiers_on(gpu))
        for gpu in range(1 + len(plan.more_vram))
    ]
    listing = f"{', '.join(map(str, counts[:-1]))} and {counts[-1]} layers"
    if not placement.slots or not any(tier.streams for tier in placement.tiers):
        return [f"The GPUs compute {listing}, one GPU after the other."]
    return [f"The GPUs compute {listing}; streamed layers alternate between them to keep all links busy."]


def _where_experts_are(plan: Plan) -> list[str]:
    """Explain the expert slots of each memory, and the expected hit rate of a pass of one row."""
    experts, placement = plan.costs.experts, plan.placement
    if experts is None:
        return []
    count = experts.count * experts.layers
    near = f"{placement.expert_slots:,} fit in {plan.memory_name(Tier.DEVICE)}"
    come = "missing ones are read, or copied, when a router chooses them"
    if placement.cpu_experts:
        near = f"{placement.host_expert_slots:,} fit in {plan.memory_name(Tier.HOST)}"
        come = "the CPU computes the chosen ones and reads missing ones"
    elif placement.host_expert_slots:
        near += f" and {placement.host_expert_slots:,} in {plan.memory_name(Tier.HOST)}"
    asked, hit = experts.layers * float(experts.distinct_experts(1)), float(experts.hit_rate(1))
    several = experts.layers * float(experts.distinct_experts(_SEVERAL))
    return [
        f"Of {count:,} experts, {near}; {come}.",
        f"A row requests {asked:,.0f} of them, with an expected cache hit rate of {hit:.0%}; "
        f"{_SEVERAL} rows together request {several:,.0f}.",
    ]


def _where_caches_are(plan: Plan) -> list[str]:
    """Explain the placement of the KV cache, unless it is on the device."""
    if plan.placement.caches is Tier.DEVICE:
        return []
    nbytes = sum(part.bytes for part in plan.parts if part.what == "caches" and part.tier == Tier.HOST)
    return [
        f"The KV cache is in RAM, {format_bytes(nbytes)} for {plan.context:,} tokens, and is copied to "
        f"{plan.memory_name(Tier.DEVICE)} layer by layer in every pass; times assume a full context."
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
        return [] if placement.slots or placement.on_demand_experts else ["No weights move during decoding."]
    seconds = f"{format_seconds(plan.costs.link)}{' on the slower link' if len(crossings) > 1 else ''}"
    head = ", the output head last" if placement.head is not Tier.DEVICE else ""
    ring = f"A streaming buffer of {format_count(placement.slots, 'slot')} lets"
    if placement.staging:
        ring = f"Streaming buffers of {placement.slots} slots in VRAM and {placement.staging} in RAM let"
    return [
        f"Every pass moves {' and '.join(crossings)}{head}: {seconds}.",
        f"{ring} the link run ahead during drafting.",
    ]


def explain_tree(plan: Plan) -> tuple[str, ...]:
    """Explain how many nodes are free, and the effect of half and twice the budget."""
    if plan.draft_mode == "none":
        each = " per sequence" if plan.sequences > 1 else ""
        if plan.budget > plan.sequences:
            more = "and more in repetitive text"
            return (f"Without a draft model, a pass yields one token{each}, {more}.",)
        return (f"Without a draft, every pass yields one token{each}.",)
    return (*_free_nodes(plan), *_other_budgets(plan))


def _free_nodes(plan: Plan) -> list[str]:
    """Explain how many nodes cost no time because the link is busy anyway; nothing if no weights stream."""
    costs, draft = plan.costs.for_sequences(plan.sequences), plan.forecast.draft_seconds
    if not costs.link or costs.experts is not None:
        return []
    measured = np.arange(1, costs.compute[-1][0] + 1)
    waits = float(costs.iteration(draft, plan.sequences))
    most = int(np.sum(costs.iteration(draft, measured) <= _FREE * waits))
    if most == len(measured):
        nodes = f"{most:,} nodes{' in total' if plan.sequences > 1 else ''}"
        return [f"Trees of at least {nodes} compute while the link is busy and cost no time."]
    if most < _FEW:
        return ["Every node costs time: transfers do not hide computing."]
    return [f"Up to {most:,} nodes compute while the link is busy; further nodes cost time."]


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
    return [f"A tree size of {format_count(plan.budget, 'node')} gives {here} tok/s; {' and '.join(others)}."]


def explain_speed(plan: Plan) -> tuple[str, ...]:
    """Explain the bottleneck of a pass, its yield, and the time to the first token."""
    forecast = plan.forecast
    yields = (
        f"A pass takes {format_seconds(forecast.seconds_per_pass)} and yields "
        f"{format_number(forecast.tokens_per_pass)} tokens ({plan.acceptance}): "
        f"{explain_rate(plan)}."
    )
    alone = f"One token per pass would be {format_number(plan.tok_per_s_alone)} tok/s."
    if plan.sequences > 1:
        alone = f"One token per sequence and pass would be {format_number(plan.tok_per_s_alone)} tok/s."
    first = (
        f"The first token of a prompt of {forecast.prompt_tokens:,} tokens comes after "
        f"{format_seconds(forecast.ttft_s)}; {explain_first_token(plan)}."
    )
    return explain_bound(plan), yields, alone, first


def explain_rate(plan: Plan) -> str:
    """Return tokens per second, for several sequences total and each."""
    rate = f"{format_number(plan.forecast.tok_per_s)} tok/s"
    if plan.sequences == 1:
        return rate
    each = format_number(plan.forecast.tok_per_s / plan.sequences)
    return f"{rate} total, {each} for each of {plan.sequences} sequences"


def explain_shared(plan: Plan) -> tuple[str, ...]:
    """Explain the number of sequences up to which sharing pays, and the cost of a new prompt."""
    if not plan.shared:
        return ()
    costs, draft = plan.costs.for_sequences(plan.sequences), plan.forecast.draft_seconds
    longer = float(costs.iteration(draft, plan.budget + PROMPT_ROWS))
    chunk = (
        f"Prompts are read in chunks of {PROMPT_ROWS:,} tokens alongside the trees of the others, whose pass "
        f"then takes {format_seconds(longer)}."
    )
    room = "Twice as many sequences do not fit with this context and draft."
    return _knee(plan), *([room] if plan.shared[-1].sequences < 2 * plan.sequences else []), chunk


def _knee(plan: Plan) -> str:
    """Explain from which number of sequences on they slow each other down, and why."""
    found = knee(plan.shared)
    if found is None:
        return "Doubling the sequences raises the speed by at least half, up to the last of these numbers."
    before = next(row for row in plan.shared if row.sequences == found)
    after = plan.shared[plan.shared.index(before) + 1]
    longer = after.seconds_per_pass - before.seconds_per_pass
    if 2 * (after.link_seconds - before.link_seconds) < longer:
        why = "a pass drafts and computes for all of them"
    elif plan.costs.experts is not None:
        why = "each requests its own experts, which must be loaded"
    else:
        why = "KV caches displace layers, so more streams"
    many = format_count(found, "sequence")
    return f"From {many} on, doubling them raises the speed by less than half: {why}."


def explain_bound(plan: Plan) -> str:
    """Explain the bottleneck of a pass."""
    forecast = plan.forecast
    draft, compute = format_seconds(forecast.draft_seconds), format_seconds(forecast.compute_seconds)
    link = format_seconds(forecast.link_seconds)
    overlap = f"overlapping {link} of streaming" if forecast.link_seconds else "with nothing to stream"
    if forecast.bound == "compute":
        return f"Compute-bound: {compute} of computing after {draft} of drafting, {overlap}."
    if forecast.bound == "link" and plan.costs.experts is not None:
        return (
            f"Bound by loading experts: {link}, overlapping {draft} of drafting and {compute} of computing."
        )
    if forecast.bound == "draft":
        return f"Draft-bound: {draft} of drafting before {compute} of computing, {overlap}."
    if forecast.seconds_per_pass <= _FREE * forecast.link_seconds:
        return (
            f"Transfer-bound: {link} of streaming, which overlaps {draft} of drafting and {compute} of "
            "computing."
        )
    ahead = format_seconds(max(plan.costs.link - plan.costs.rest, 0.0))
    hidden = forecast.draft_seconds * (1.0 - float(plan.costs.exposed_share(plan.budget)))
    some = f", {format_seconds(hidden)} of them during the previous pass" if hidden else ""
    return (
        f"Transfer-bound: of {link} of streaming, {ahead} overlaps drafting ({draft}{some}); the link then "
        f"idles until drafting ends. Computing takes {compute}."
    )


def explain_first_token(plan: Plan) -> str:
    """Explain the time to the first token; the prompt needs one weight transfer."""
    if plan.sequences > 1:
        return "it waits for a pass of the others and joins the next"
    link = float(plan.costs.link_seconds(plan.forecast.prompt_tokens))
    if plan.costs.experts is not None:
        return f"the experts requested by the prompt take {format_seconds(link)} to load"
    if link and plan.forecast.ttft_s <= _NEAR * link:
        return f"the prompt is processed in one weight transfer of {format_seconds(link)}"
    if link:
        return f"drafting and computing take longer than the one weight transfer of {format_seconds(link)}"
    return "compute-bound"
