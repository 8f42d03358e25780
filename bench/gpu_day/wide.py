"""The demo model widened, behind limits of device memory and slower links: real text at a real size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.gpu_day.answers import PROMPTS, ask, engine_of, least_vram, short, tried
from bench.gpu_day.day import Day
from bench.gpu_day.models import install_demo, widened
from bench.gpu_day.paced import paced
from bench.gpu_day.watch import device_kernels


@dataclass(frozen=True, slots=True)
class Case:
    """factor: of the widening. vram: memory limit of the device. rate: GB/s of the link, None as it is."""

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


def measure(day: Day) -> None:
    install_demo(day)
    for case in _DRY if day.dry else _CASES:
        row: dict[str, Any] = {}
        day.found[case.name] = row
        with paced(None if case.rate is None else case.rate * 1e9):
            try:
                _answer(day, case, row)
            except Exception as error:
                tried(day, case.name, row, error)
        _compare(day, case)
        day.found["short"] = short(day.found)
        day.save()


def _answer(day: Day, case: Case, row: dict[str, Any]) -> None:
    folder = widened(day, case.factor, nf4=case.nf4)
    load: dict[str, Any] = (
        {"draft": "demo", "draft_bits": 4} if case.draft else {"draft": "none", "budget": 1}
    )
    load |= {"model": str(folder), "device": "cuda", "context": 512 if day.dry else 1024}
    load |= {"budget": 4, "width": 2} if day.dry and case.draft else {}
    load |= {"vram": least_vram(**load)} if day.dry else {"vram": case.vram, "memory": "60GB"}
    with engine_of(row, replan=case.draft and not day.dry, **load) as engine:
        tokens = (4 if case.draft else 2) if day.dry else (96 if case.draft else 8)
        prompts = PROMPTS[: 1 if day.dry or not case.draft else 2]
        row["answers"] = [ask(engine, prompt, tokens) for prompt in prompts]
        if case in _CASES[:1]:
            row["profile"] = device_kernels(lambda: ask(engine, prompts[0], 2))


def _compare(day: Day, case: Case) -> None:
    """Check that answers with and without a draft begin with the same tokens."""
    if case.draft or "answers" not in day.found[case.name]:
        return
    with_draft = day.found.get(case.name.removesuffix(" off"), {}).get("answers")
    if with_draft:
        plain = day.found[case.name]["answers"][0]["ids"]
        day.found[case.name]["same"] = plain == with_draft[0]["ids"][: len(plain)]
        if not day.found[case.name]["same"]:
            day.found["error"] = f"{case.name}: speculation changed tokens"
