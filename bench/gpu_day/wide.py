"""The widened demo model with device memory limits and slower links: real text at a real size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.gpu_day.answers import PROMPTS, ask, engine_of, least_vram, short, tried
from bench.gpu_day.models import install_demo, widened_model
from bench.gpu_day.profiling import device_kernels
from bench.gpu_day.step_context import StepContext
from bench.gpu_day.throttled_link import throttled


@dataclass(frozen=True, slots=True)
class Case:
    """A case. factor: widening; vram: limit of device memory; rate: GB/s of the link, None: unthrottled."""

    factor: int
    nf4: bool
    vram: str
    rate: float | None
    draft: bool = True

    @property
    def name(self) -> str:
        link = "own link" if self.rate is None else f"{self.rate:g} GB/s"
        return (
            f"x{self.factor} {'nf4' if self.nf4 else 'bf16'} {self.vram} {link}{'' if self.draft else ' off'}"
        )


_CASES = (
    Case(16, True, "8GB", 25.0),
    Case(16, True, "8GB", 25.0, draft=False),
    Case(8, False, "8GB", 25.0),
    Case(8, False, "8GB", 25.0, draft=False),
    Case(16, True, "12GB", 25.0),
    Case(8, False, "8GB", None),
    Case(16, True, "8GB", 12.0),
    Case(8, False, "12GB", 25.0),
    Case(16, True, "24GB", None),
)
_DRY = (Case(1, True, "tight", 0.2), Case(1, False, "tight", None, draft=False))


def measure(context: StepContext) -> None:
    install_demo(context)
    for case in _DRY if context.dry else _CASES:
        row: dict[str, Any] = {}
        context.found[case.name] = row
        with throttled(None if case.rate is None else case.rate * 1e9):
            try:
                _answer(context, case, row)
            except Exception as error:
                tried(context, case.name, row, error)
        _compare(context, case)
        context.found["short"] = short(context.found)
        context.save()


def _answer(context: StepContext, case: Case, row: dict[str, Any]) -> None:
    folder = widened_model(context, case.factor, nf4=case.nf4)
    load: dict[str, Any] = (
        {"draft": "demo", "draft_bits": 4} if case.draft else {"draft": "none", "budget": 1}
    )
    load |= {"model": str(folder), "device": "cuda", "context": 512 if context.dry else 1024}
    load |= {"budget": 4, "width": 2} if context.dry and case.draft else {}
    load |= {"vram": least_vram(**load)} if context.dry else {"vram": case.vram, "memory": "60GB"}
    with engine_of(row, replan=case.draft and not context.dry, **load) as engine:
        tokens = (4 if case.draft else 2) if context.dry else (96 if case.draft else 8)
        prompts = PROMPTS[: 1 if context.dry or not case.draft else 2]
        row["answers"] = [ask(engine, prompt, tokens) for prompt in prompts]
        if case in _CASES[:1]:
            row["profile"] = device_kernels(lambda: ask(engine, prompts[0], 2))


def _compare(context: StepContext, case: Case) -> None:
    """Check that answers with and without a draft begin with the same tokens."""
    if case.draft or "answers" not in context.found[case.name]:
        return
    with_draft = context.found.get(case.name.removesuffix(" off"), {}).get("answers")
    if with_draft:
        plain = context.found[case.name]["answers"][0]["ids"]
        context.found[case.name]["same"] = plain == with_draft[0]["ids"][: len(plain)]
        if not context.found[case.name]["same"]:
            context.found["error"] = f"{case.name}: speculation changed tokens"
