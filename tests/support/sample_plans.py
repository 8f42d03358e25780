"""Sample plans: a small target on a CPU, and a large one on a card with its own memory."""

from dataclasses import replace

from offspec_planners.cost import PassCosts
from offspec_planners.hardware_rates import Hardware, Processor, Rate
from offspec_planners.placement import Placement, Tier
from offspec_planners.plan import Part, Plan
from offspec_planners.plan.forecast import (
    Choice,
    Comparison,
    Forecast,
    Shared,
    Validation,
    ValidationRow,
    WhatIf,
)

GB = 10**9

LAPTOP = Hardware(
    name="laptop",
    ram=8 * GB,
    disk=Rate(2.1e9, 1.9e9, 2.2e9),
    link=None,
    processor=Processor("8 cores", 8 * GB, Rate(2.0e10, 1.8e10, 2.1e10), ((1, 1e10), (64, 2.5e11)), 2e-4),
)
CARD = Hardware(
    name="desktop with a card",
    ram=64 * GB,
    disk=Rate(6.5e9, 6.5e9, 6.5e9),
    link=Rate(2.48e10, 2.48e10, 2.48e10),
    processor=Processor(
        "RTX 4090",
        24 * GB,
        Rate(9e11, 9e11, 9e11),
        ((1, 9e11), (16, 1.4e13), (256, 1.2e14), (2048, 1.5e14)),
        5e-5,
    ),
    sources=("https://example.org/rtx-4090",),
)
COSTS = PassCosts(
    compute=((1, 0.31), (16, 0.32), (64, 0.41), (256, 0.84), (512, 1.5), (1024, 2.9)),
    step=((1, 0.012), (8, 0.018), (32, 0.042), (64, 0.081)),
    start=0.02,
    link=1.29,
    rest=1.13,
    edge=((1, 0.0217), (16, 0.0224), (64, 0.0287), (256, 0.0588), (512, 0.105), (1024, 0.203)),
)
CARD_COSTS = PassCosts(
    compute=((1, 0.17), (64, 0.21), (256, 0.4), (1024, 1.6), (4096, 6.6)),
    step=((1, 0.017), (32, 0.02), (128, 0.031)),
    start=0.02,
    link=13.2,
    rest=12.4,
    edge=((1, 0.002), (4096, 0.07)),
)


def forecast(
    costs: PassCosts, draft: float, rows: int, tokens: float, *, ttft_s: float, prompt_tokens: int
) -> Forecast:
    """Forecast from the costs, for a draft's seconds, a pass's rows and its tokens."""
    seconds = float(costs.iteration(draft, rows))
    compute = float(costs.compute_seconds(rows))
    bound = costs.bound(draft, rows)
    speed = tokens / seconds
    return Forecast(ttft_s, prompt_tokens, seconds, tokens, speed, draft, compute, costs.link, bound)


def sweep(costs: PassCosts, tokens: dict[int, float], widths: tuple[int, ...]) -> tuple[Choice, ...]:
    """Tree sizes with their expected tokens, in four steps of each width."""
    choices = []
    for budget, expected in tokens.items():
        for width in widths:
            seconds = float(costs.iteration(costs.draft_seconds((width,) * 4), budget))
            choices.append(Choice(budget, width, expected / seconds, expected, seconds))
    return tuple(choices)


def small() -> Plan:
    """Some layers stay in RAM, the others stream from disk; the draft is a self-draft."""
    tiers = (Tier.DISK, Tier.DISK, Tier.DEVICE, Tier.DISK, Tier.DISK) * 6
    return Plan(
        target="SmolLM2-135M widened x4",
        target_print="0123456789ab",
        draft="self",
        draft_print="ba9876543210",
        hardware=LAPTOP,
        device="cpu",
        dtype="bfloat16",
        memory=3 * GB,
        vram=None,
        context=4096,
        temperature=0.0,
        draft_mode="packed",
        draft_bits=4,
        chunk=1024,
        parts=(
            Part("Python and libraries", "device", 420_000_000),
            Part("layers", "device", 678_000_000),
            Part("3 slots", "device", 339_000_000),
            Part("head and norms", "device", 226_000_000),
            Part("KV caches", "device", 190_000_000),
            Part("the draft", "device", 520_000_000),
            Part("scratch", "device", 310_000_000),
            Part("layers", "disk", 2_712_000_000),
        ),
        placement=Placement(tiers, slots=3),
        budget=256,
        width=16,
        depth=24,
        tree="dynamic",
        costs=COSTS,
        forecast=forecast(COSTS, 0.14, 256, 9.8, ttft_s=1.43, prompt_tokens=128),
        sweep=sweep(COSTS, {16: 4.9, 64: 7.4, 128: 8.7, 256: 9.8, 512: 10.9, 1024: 11.6}, (4, 16, 64)),
        what_ifs=(
            WhatIf("1.00 GB more RAM", 8.4, "9 more layers stay"),
            WhatIf("4-bit weights", 14.2, "a quarter of the bytes stream"),
            WhatIf("no draft", 0.74, "one token per pass"),
            WhatIf("a 2.00 GB budget", None, "the draft does not fit"),
        ),
        acceptance="measured over 24 passes",
        measured=True,
        least_memory=1_640_000_000,
        least_vram=None,
        notes=("the disk's speed drifted by 14 % while it was measured",),
    )


def large() -> Plan:
    """All three tiers are in use, and the head streams."""
    tiers = (Tier.DEVICE,) * 5 + (Tier.HOST, Tier.DISK, Tier.DISK) * 25
    return replace(
        small(),
        target="meta-llama/Llama-3.1-70B-Instruct",
        draft="meta-llama/Llama-3.1-8B-Instruct",
        hardware=CARD,
        device="cuda",
        memory=60 * GB,
        vram=22 * GB,
        draft_mode="full",
        draft_bits=16,
        temperature=0.6,
        context=8192,
        parts=(
            Part("layers", "device", 8_560_000_000),
            Part("slots", "device", 5_136_000_000),
            Part("the draft", "device", 4_900_000_000),
            Part("layers", "host", 42_800_000_000),
            Part("slots on the way", "host", 5_136_000_000),
            Part("head", "host", 2_100_000_000),
            Part("layers", "disk", 85_600_000_000),
        ),
        placement=Placement(tiers, slots=3, staging=3, head=Tier.HOST),
        budget=768,
        width=32,
        costs=CARD_COSTS,
        forecast=forecast(CARD_COSTS, 0.5, 768, 18.4, ttft_s=14.1, prompt_tokens=512),
        sweep=sweep(CARD_COSTS, {64: 10.6, 256: 15.8, 768: 18.4, 1024: 18.8}, (32,)),
        acceptance="typical of a small model, not measured",
        least_vram=6_400_000_000,
    )


def several() -> Plan:
    """A plan for eight sequences: 16 would be faster, and are the most that fit."""
    found = {1: 7.4, 2: 12.9, 4: 21.6, 8: 33.0, 16: 45.0}
    rows = [
        Shared(count, 256, speed, 1.6 * speed, 1.6, 1.29 + 0.02 * count, 190_000_000 * count)
        for count, speed in found.items()
    ]
    return replace(
        small(),
        sequences=8,
        forecast=replace(small().forecast, tok_per_s=33.0, tokens_per_pass=52.8, seconds_per_pass=1.6),
        shared=tuple(rows),
    )


def validation() -> Validation:
    """Three prompts; the medians are those of the second."""
    rows = (
        ("Why is the sky blue?", (1.35, 1.31), (7.26, 7.9), (9.8, 10.3)),
        ("Write a poem about\nrivers, in four lines, for a child", (1.35, 1.38), (7.26, 6.6), (9.8, 9.1)),
        ("2 + 2 =", (1.35, 1.5), (7.26, 5.0), (9.8, 7.5)),
    )
    return Validation(
        tuple(
            ValidationRow(prompt, Comparison(*passes), Comparison(*speed), Comparison(*tokens))
            for prompt, passes, speed, tokens in rows
        )
    )
