"""The demo model on the device: the same tokens with and without speculation, at two temperatures."""

from __future__ import annotations

from typing import Any

from bench.gpu_day.answers import PROMPTS, ask, engine_of
from bench.gpu_day.models import install_demo
from bench.gpu_day.step_context import StepContext


def measure(context: StepContext) -> None:
    install_demo(context)
    tokens = 3 if context.dry else 64
    prompts = PROMPTS[: 1 if context.dry else 3]
    found: dict[str, Any] = context.found
    ways: dict[str, dict[str, Any]] = {
        "on": {"budget": 4, "width": 2} if context.dry else {"budget": 64, "width": 16},
        "off": {"draft": "none", "budget": 1},
    }
    for name, settings in ways.items():
        row = found[name] = {}
        with engine_of(row, replan=False, model="demo", device="cuda", context=600, **settings) as engine:
            row["answers"] = [
                ask(engine, prompt, tokens, temperature=temperature)
                for prompt in prompts
                for temperature in (0.0, 1.0)
            ]
            if name == "on":
                row["checked"] = ask(engine, prompts[0], tokens, check=True)["mismatches"]
        context.save()
    pairs = list(zip(found["on"]["answers"], found["off"]["answers"], strict=True))
    found["same"] = [on["ids"] == off["ids"] for on, off in pairs]
    speeds = [f"{on['tok_per_s']:.0f} of {off['tok_per_s']:.0f}" for on, off in pairs]
    found["short"] = (
        f"same tokens: {found['same']}, checked: {found['on']['checked']}; tok/s on and off: {speeds}"
    )
    if found["on"]["checked"] or not all(found["same"]):
        found["error"] = f"speculation changed tokens: {found['same']}, checked: {found['on']['checked']}"
