"""Cost model compared with published figures: seconds per token of SpecExec, Sequoia and DeepSpeed.

Nothing is measured here. Published machines, bytes and trees are entered into the formulas that plan for
remote machines. The assumptions about a system apply to all of its rows and are printed with them.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from typing import Any

from bench.lib.command import Command
from bench.lib.report import Report
from bench.plan.published_rows import MODELS, ROWS, SYSTEMS, Model, Row
from offspec_planners.cost import Estimate, ModelSizes, PassCosts, draft_step, product_seconds
from offspec_planners.hardware_rates import Hardware, Processor, preset
from offspec_planners.placement import Placement, Sizes, Tier, place_on_devices

WANTED = 0.3  # maximum relative error of a prediction
_GB = 10**9
_OWN = 2 * _GB  # of a device: CUDA context, KV caches, activations
_SHOWN = ("system", "label", "seconds", "tokens", "source", "why_not")  # stored elsewhere in a record
_HALF_BYTES = 0.52  # bytes of a 4-bit weight: 4 bits, and a scale and a zero point per group of 128


def sizes_of(name: str, bits: int = 16) -> ModelSizes:
    """Return the sizes of a Llama-like decoder, with `bits` per weight in its layers and 16 in its head."""
    model: Model = MODELS[name]
    weights = 2 * model.hidden * (model.hidden + model.kv) + 3 * model.hidden * model.inner
    stored = int(weights * (2 if bits == 16 else _HALF_BYTES))
    head = model.hidden * model.vocabulary
    return ModelSizes(
        name=name,
        layers=(stored,) * model.layers,
        weights=weights,
        head=2 * head,
        head_weights=head,
        kv_per_token=4 * model.kv * model.layers,
        attention=4 * model.hidden,
        hidden=model.hidden,
        vocabulary=model.vocabulary,
    )


def predict(row: Row) -> dict[str, float]:
    """Return the predicted seconds of a pass of one published run, and of its parts."""
    hardware, target = preset(row.machine), sizes_of(row.target, row.bits)
    if row.vram is not None:
        hardware = replace(hardware, processor=replace(hardware.processor, memory=row.vram))
    draft = sizes_of(row.draft) if row.draft else None
    costs: PassCosts = Estimate(hardware, None).costs(target, _placement(row, hardware, target), 8.0)
    if not SYSTEMS[row.system].ahead:
        costs = replace(costs, rest=costs.link)  # no transfer overlaps drafting
    drafting = 0.0
    if draft is not None:
        drafting = row.steps * _step(hardware.processor, draft, row.width, row.draft_bits)
    seconds = float(costs.iteration(drafting, row.nodes))
    compute = float(costs.compute_seconds(row.nodes))
    return {"draft": drafting, "link": costs.link, "compute": compute, "pass": seconds}


def _step(processor: Processor, draft: ModelSizes, width: int, bits: int) -> float:
    """Return the seconds of a draft step that reads weights as stored."""
    step = draft_step(processor, draft, width)
    if bits == 16:
        return step
    less = product_seconds(processor, draft.weights, width, _HALF_BYTES)
    return step - len(draft.layers) * (product_seconds(processor, draft.weights, width) - less)


def _placement(row: Row, hardware: Hardware, target: ModelSizes) -> Placement:
    """Return a placement with two slots, embeddings and head on the device, and the row's resident layers."""
    count = len(target.layers)
    if row.resident is None:  # as many layers as fit; such rows have no draft
        room = hardware.processor.memory - _OWN - 2 * target.head
        return place_on_devices(Sizes(target.layers, (0,) * count), [room], 10**15, slots=2)
    return Placement((Tier.HOST,) * count, slots=2)


def _record(row: Row) -> dict[str, Any]:
    """Return a row for the record. predicted, published: seconds per token."""
    found = predict(row)
    predicted = found["pass"] / row.tokens
    ratio = predicted / row.seconds
    return {
        "system": row.system,
        "run": row.label,
        "predicted": predicted,
        "published": row.seconds,
        "ratio": ratio,
        "tokens": row.tokens,
        "given": True,  # the tokens per pass were published too
        **found,
        "source": row.source,
        "settings": {key: value for key, value in asdict(row).items() if key not in _SHOWN},
        **({"why_not": row.why_not} if abs(ratio - 1) > WANTED else {}),
    }


def _cells(record: dict[str, Any]) -> list[str]:
    parts = [f"{record[key]:.2f}" for key in ("draft", "link", "pass")]
    both = [f"{record[key]:.3f}" for key in ("predicted", "published")]
    tokens, ratio = f"{record['tokens']:.1f}", f"{record['ratio']:.2f}"
    return [f"{record['system']}: {record['run']}", tokens, *parts, *both, ratio]


def options(p: argparse.ArgumentParser) -> None:
    """Add no options."""


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Predict every row and report."""
    report.ceiling(f"predicted over published seconds per token within {WANTED:.0%} of 1")
    records = [_record(row) for row in ROWS]
    near = sum("why_not" not in record for record in records)
    report.reached(f"{near} of {len(records)} rows", near / len(records))
    heads = ("tokens", "draft s", "link s", "pass s", "predicted", "published", "ratio")
    report.table("seconds per token", ("run", *heads), map(_cells, records))
    for name, system in SYSTEMS.items():
        report.note(f"{name}: {system.assumed}")
    for record in records:
        if "why_not" in record:
            report.note(f"{record['run']}, {record['ratio']:.2f}: {record['why_not']}")
    assumed = {name: system.assumed for name, system in SYSTEMS.items()}
    report.record({**report.head(args), "assumed": assumed, "rows": records})
    kept = ("system", "run", "predicted", "published", "ratio", "tokens", "given", "why_not")
    short = [{key: record[key] for key in kept if key in record} for record in records]
    return {**report.head(args), "rows": short}


main = Command("published", "Cost model and published figures.", options, bench, module="plan.published")

if __name__ == "__main__":
    sys.exit(main())
