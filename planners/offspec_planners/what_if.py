"""What-if rows of a plan: variants of its machine, format and draft that change its speed."""

from collections.abc import Iterable

from offspec_planners.cost import ModelSizes
from offspec_planners.placement import Placement, Tier
from offspec_planners.plan.forecast import Choice, Shared, WhatIf
from offspec_planners.units import format_bytes, format_number

_GAIN = 1.05  # times the speed; smaller gains are omitted


def faster_rows(choice: Choice, ladders: Iterable[Iterable[WhatIf]]) -> list[WhatIf]:
    """Return the rows that are faster than a choice and than earlier rows of their ladder."""
    rows = list[WhatIf]()
    for ladder in ladders:
        before = choice.tok_per_s
        for row in ladder:
            speed = row.tok_per_s or 0.0
            if speed >= _GAIN * before:
                rows.append(row)
                before = speed
    return rows


def undrafted_rows(choice: Choice, alone: float) -> list[WhatIf]:
    """Return a row for no draft, with its tokens per second, unless it is about as fast as a choice."""
    if choice.tok_per_s < _GAIN * alone < _GAIN**2 * choice.tok_per_s:
        return []
    return [WhatIf("no draft", alone, "one token per pass")]


def sequence_rows(choice: Choice, sequences: int, shared: Iterable[Shared]) -> list[WhatIf]:
    """Return rows for a single sequence, and for more sequences than a plan's while more are faster."""
    rows, before = list[WhatIf](), choice.tok_per_s
    for row in shared:
        if row.sequences == 1:
            rows.append(WhatIf("with 1 sequence", row.tok_per_s, "while others wait"))
        elif row.sequences > sequences and row.tok_per_s >= _GAIN * before:
            note = f"{format_number(row.each)} tok/s each; caches of {format_bytes(row.caches)}"
            rows.append(WhatIf(f"with {row.sequences} sequences", row.tok_per_s, f"total, {note}"))
            before = row.tok_per_s
    return rows


def explain_memories(placement: Placement, target: ModelSizes, *, vram: bool) -> str:
    """Return the share of layers, or experts, in each memory as a clause.

    Args:
        placement: Tiers of the layers.
        target: Sizes of the target.
        vram: Whether a device has memory of its own.
    """
    tiers, memory = placement.tiers, "VRAM" if vram else "RAM"
    if placement.on_demand_experts and target.experts is not None:
        slots = {memory: placement.expert_slots} | ({"RAM": placement.host_expert_slots} if vram else {})
        shares = {where: count / target.experts.every for where, count in slots.items() if count}
        return f"{' and '.join(f'{share:.0%} in {where}' for where, share in shares.items())} of experts"
    counts = {memory: tiers.count(Tier.DEVICE)}
    counts["RAM"] = counts.get("RAM", 0) + tiers.count(Tier.HOST) + tiers.count(Tier.CPU)
    first, *others = [(count, where) for where, count in counts.items() if count] or [(0, memory)]
    if first[0] == len(tiers):
        return f"all layers in {first[1]}"
    listing = [
        f"{first[0]} of {len(tiers)} layers in {first[1]}",
        *(f"{n} in {where}" for n, where in others),
    ]
    return ", ".join(listing)
