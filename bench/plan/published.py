"""The cost model beside published figures: seconds per token of SpecExec, Sequoia and UMbreLLa.

Nothing is measured here. Their machines, bytes and trees go into the same formulas that plan for a machine
that is elsewhere. What is assumed of each system holds for all of its rows and is printed with them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table

from bench.lib.command import Command
from bench.lib.report import Report
from bench.plan.published_rows import MODELS, ROWS, SYSTEMS, Model, Row
from offspec_planners.acceptance import typical
from offspec_planners.best_first import replay
from offspec_planners.cost import Estimate, ModelSizes, PassCosts, draft_step, product_seconds
from offspec_planners.hardware import Hardware, Processor, preset
from offspec_planners.placement import Placement, Sizes, Tier, place_on_device, spread

WANTED = 0.3  # that a prediction may be off
_GB = 10**9
_OWN = 2 * _GB  # of a device: the driver's share, caches, activations
_SHOWN = ("system", "label", "seconds", "tokens", "source", "why_not")  # elsewhere in a record
_HALF_BYTES = 0.52  # of a 4-bit weight: 4 bits, and a scale and a zero point for each group of 128


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of one pass, its parts, and tokens of it; `given` tells whether those were published."""

    draft: float
    link: float
    compute: float
    seconds: float
    tokens: float
    given: bool

    @property
    def per_token(self) -> float:
        return self.seconds / self.tokens


def sizes_of(name: str, bits: int = 16) -> ModelSizes:
    """A decoder of the Llama kind, its layers stored in so many bits and its head in 16."""
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


def machine_of(row: Row) -> Hardware:
    """The preset, with a smaller device memory where a row says so."""
    hardware = preset(row.machine)
    if row.vram is None:
        return hardware
    return replace(hardware, processor=replace(hardware.processor, memory=row.vram))


def predict(row: Row) -> Prediction:
    """What our formulas say of one published run."""
    hardware, target = machine_of(row), sizes_of(row.target, row.bits)
    draft = sizes_of(row.draft) if row.draft else None
    placement = _placement(row, hardware, target, draft)
    costs: PassCosts = Estimate(hardware, None).costs(target, placement, 8.0)
    if not SYSTEMS[row.system].ahead:
        costs = replace(costs, rest=costs.link)  # nothing crosses the link while the draft works
    drafting = 0.0
    if draft is not None:
        drafting = row.steps * _step(hardware.processor, draft, row.width, row.draft_bits)
    seconds = float(costs.iteration(drafting, row.nodes))
    compute = float(costs.compute_seconds(row.nodes))
    tokens = row.tokens if row.tokens is not None else _guess(row, target, draft)
    return Prediction(drafting, costs.link, compute, seconds, tokens, row.tokens is not None)


def _step(processor: Processor, draft: ModelSizes, width: int, bits: int) -> float:
    """Of a draft that is read as it is stored."""
    step = draft_step(processor, draft, width)
    if bits == 16:
        return step
    less = product_seconds(processor, draft.weights, width, _HALF_BYTES)
    return step - len(draft.layers) * (product_seconds(processor, draft.weights, width) - less)


def _placement(row: Row, hardware: Hardware, target: ModelSizes, draft: ModelSizes | None) -> Placement:
    """Two slots, embeddings, head and draft on the device, and as many layers as the row says."""
    count = len(target.layers)
    if row.resident is None:
        drafting = 0 if draft is None else 2 * draft.parameters + draft.head
        room = hardware.processor.memory - _OWN - 2 * target.head - drafting
        return place_on_device(Sizes(target.layers, (0,) * count), room, 10**15, slots=2)
    stays = set(spread(count, row.resident))
    return Placement(tuple(Tier.DEVICE if layer in stays else Tier.HOST for layer in range(count)), slots=2)


def _guess(row: Row, target: ModelSizes, draft: ModelSizes | None) -> float:
    """Tokens per pass of a typical draft of this size, with a tree of this size."""
    assert draft is not None
    forest = typical("model", draft.parameters / target.parameters).forest
    grown = [replay(tree, row.nodes, row.width, None, 0.0, row.steps) for tree in forest]
    return statistics.mean(one.expected for one in grown)


def _view(records: Sequence[dict[str, Any]]) -> Table:
    view = Table("run", "tokens", "draft s", "link s", "pass s", "predicted", "published", "ratio")
    for record in records:
        tokens = f"{record['tokens']:.1f}" + ("" if record["given"] else " (ours)")
        parts = [f"{record[key]:.2f}" for key in ("draft", "link", "pass")]
        both = [f"{record[key]:.3f}" for key in ("predicted", "published")]
        view.add_row(f"{record['system']}: {record['run']}", tokens, *parts, *both, f"{record['ratio']:.2f}")
    return view


def _record(row: Row, found: Prediction) -> dict[str, Any]:
    """All of a row. predicted, published: seconds per token."""
    ratio = found.per_token / row.seconds
    return {
        "system": row.system,
        "run": row.label,
        "predicted": found.per_token,
        "published": row.seconds,
        "ratio": ratio,
        "tokens": found.tokens,
        "given": found.given,
        "tokens_that_would_agree": found.seconds / row.seconds,
        "draft": found.draft,
        "link": found.link,
        "compute": found.compute,
        "pass": found.seconds,
        "source": row.source,
        "settings": {key: value for key, value in asdict(row).items() if key not in _SHOWN},
        **({"why_not": row.why_not} if abs(ratio - 1) > WANTED else {}),
    }


def options(p: argparse.ArgumentParser) -> None:
    """Nothing may be chosen."""


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Predict every row and tell."""
    report.ceiling(f"predicted over published seconds per token within {WANTED:.0%} of 1")
    records = [_record(row, predict(row)) for row in ROWS]
    for whose, given in (("published", True), ("guessed", False)):
        group = [record for record in records if record["given"] == given]
        near = sum("why_not" not in record for record in group)
        report.reached(f"{near} of {len(group)} rows with {whose} tokens per pass", near / len(group))
    report.out.print(_view(records))
    for name, system in SYSTEMS.items():
        report.note(f"{name}: {system.assumed}")
    for record in records:
        if "why_not" in record:
            needed = f" ({record['tokens_that_would_agree']:.1f} would agree)"
            why = record["why_not"] + ("" if record["given"] else needed)
            report.note(f"{record['run']}, {record['ratio']:.2f}: {why}")
    assumed = {name: system.assumed for name, system in SYSTEMS.items()}
    report.record({**report.head(args), "assumed": assumed, "rows": records})
    kept = ("system", "run", "predicted", "published", "ratio", "tokens", "given", "why_not")
    short = [{key: record[key] for key in kept if key in record} for record in records]
    return {**report.head(args), "rows": short}


main = Command(
    "published", "The cost model beside published figures.", options, bench, module="plan.published"
)

if __name__ == "__main__":
    sys.exit(main())
