"""What a draft step costs, by its width: transformers' forward beside the lean one, and the floor below both.

    python -m bench.draft [MODEL] [--widths 8 16 32] [--held packed]

A step is what the engine repeats while it grows a tree: a forward of so many nodes over a prefix, the head,
the noise, and the ranking of children. Both forwards have the same weights and the same ranking, and take
turns. The floor is the larger of two times: reading the weights once at the rate at which memory is read
here, and multiplying at the rate of a product that is large enough to be efficient. Of a draft that is held
packed, transformers' forward unpacks the weights of each module before it runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.lib.command import MODEL, Command, shared
from bench.lib.report import Report, model_name, ratio
from offspec.core.config import SamplingParams, format_bytes
from offspec_planners.measure import gemm_rates, memory_bandwidth

if TYPE_CHECKING:
    from offspec.draft.base import Children, Scorer
    from offspec.draft.lm import DraftModel
    from offspec.model.loaded import LoadedModel

_EFFICIENT_ROWS = 256
_TURNS = 3


@dataclass(frozen=True, slots=True)
class Floor:
    """What no step can beat here. nbytes and weights: of all layers and the head."""

    nbytes: int
    weights: int
    bytes_per_s: float
    flops_per_s: float

    def seconds(self, width: int) -> float:
        """The least that a step of `width` nodes can take."""
        return max(self.nbytes / self.bytes_per_s, 2.0 * self.weights * width / self.flops_per_s)


def measure_floor(draft: LoadedModel, dtype: str, packed: int | None = None) -> Floor:
    """Sizes from the draft's own headers, rates from this machine; packed: bits that layers are kept in."""
    from offspec.model.quantize.resident_layers import rounded_bytes

    sizes = [parameter.numel() for layer in draft.skeleton.layers for parameter in layer.parameters()]
    head: int = draft.skeleton.model.get_output_embeddings().weight.numel()
    config = draft.skeleton.config
    rate = gemm_rates(
        [_EFFICIENT_ROWS], rows=config.intermediate_size, columns=config.hidden_size, dtype=dtype
    )[0]
    stored = sum(sizes) * draft.dtype.itemsize
    if packed is not None:
        stored = sum(rounded_bytes(layer, packed) for layer in draft.skeleton.layers)
    return Floor(stored + head * draft.dtype.itemsize, sum(sizes) + head, read_rate(), rate.flops_per_s)


def read_rate() -> float:
    """Bytes per second at which memory is read, with torch's threads; the best of a few."""
    return memory_bandwidth().high


class Steps:
    """One way of computing a draft step, over a prefix of its own."""

    def __init__(self, model: DraftModel, scorer: Scorer, prefix: int, device: str = "cpu") -> None:
        import torch

        from offspec.model.attention import TreeContext

        self._model, self._scorer, self._prefix = model, scorer, prefix
        self._device = torch.device(device)
        tokens = torch.arange(prefix, device=device).remainder(model.skeleton.vocab_size)
        with torch.inference_mode():
            model.cache.rewind(0)
            model.hidden(tokens, TreeContext.chain(prefix, self._device))
            model.cache.commit(prefix, [])

    def run(self, width: int) -> tuple[float, Children]:
        """Seconds of a step of `width` siblings, and their likeliest children."""
        import torch

        from offspec.model.attention import TreeContext

        device = self._device
        nodes = torch.arange(7, 7 + width, device=device).remainder(self._model.skeleton.vocab_size)
        start = time.perf_counter()
        with torch.inference_mode():
            context = TreeContext(
                self._prefix,
                torch.full((width,), self._prefix, device=device),
                0,
                torch.eye(width, dtype=torch.bool, device=device),
            )
            logits = self._model.logits(self._model.hidden(nodes, context))
            children = self._scorer.children(logits, [], [self._prefix + 1] * width)
        spent = time.perf_counter() - start
        self._model.cache.rewind(self._prefix)
        return spent, children


def open_draft(
    name: str, bits: int, dtype: str, capacity: int, device: str = "cpu", expand: bool = True
) -> LoadedModel:
    """The draft with all layers on the device, rounded as the engine rounds it where `bits` is below 16.

    expand: keep rounded values at 16 bits; else packed.
    """
    import torch

    from offspec.checkpoint import open_checkpoint
    from offspec.model.loaded import LoadedModel
    from offspec.model.tokenizer import TextCodec, load_tokenizer
    from offspec.plan.load_drafts import calibration_ids
    from offspec_planners.placement import Placement

    checkpoint = open_checkpoint(name, unpack=True)
    draft = LoadedModel(checkpoint.folder, checkpoint.tensors, getattr(torch, dtype), torch.device(device))
    if bits == 16:
        draft.load(
            Placement.in_memory(len(draft.layers), range(len(draft.layers)), 0), capacity, lambda *_: None
        )
    else:
        codec = TextCodec(load_tokenizer(checkpoint.folder), checkpoint.folder, checkpoint.config)
        most = min(capacity, draft.skeleton.context_length)
        draft.load_rounded(bits, expand, capacity, lambda *_: None, calibration_ids(codec, most))
    return draft


def new_scorer(vocabulary: int, temperature: float, device: str = "cpu") -> Scorer:
    from offspec.draft.base import Scorer
    from offspec.sampling.logits_processor import LogitsProcessor
    from offspec.sampling.noise import GumbelNoise
    from offspec_planners.acceptance import Calibration

    processor = LogitsProcessor(SamplingParams(temperature=temperature, seed=0), vocabulary, [])
    noise = GumbelNoise(0, vocabulary, device) if processor.uses_noise else None
    return Scorer(processor, noise, Calibration())


def in_turns(ways: dict[str, Steps], width: int, rounds: int, turns: int) -> dict[str, list[float]]:
    """Seconds of steps of each way, several in a row, as when a tree grows.

    The first of a row does not count: it finds the caches full of the other way's.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, steps in ways.items():
            times[name] += [steps.run(width)[0] for _ in range(rounds + 1)][1:]
    return times


def measure(ways: dict[str, Steps], floor: Floor, widths: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """One row a width: the floor, and of each way the median step and the least and the most."""
    rows = []
    for width in widths:
        times = in_turns(ways, width, rounds, _TURNS)
        row: dict[str, Any] = {"width": width, "floor_seconds": floor.seconds(width)}
        for name, spent_all in times.items():
            row[f"{name}_seconds"] = median(spent_all)
            row[f"{name}_spread"] = [min(spent_all), max(spent_all)]
        if "lean" in ways:
            row["speedup"] = ratio(row["transformers_seconds"], row["lean_seconds"])
            row["of_floor"] = ratio(row["floor_seconds"], row["lean_seconds"])
        rows.append(row)
    return rows


def show(row: dict[str, Any], report: Report) -> None:
    parts = [
        f"{name} {1e3 * row[f'{name}_seconds']:.1f} ms"
        for name in ("transformers", "lean")
        if f"{name}_seconds" in row
    ]
    faster = f", {row['speedup']:.2f} times as fast" if "speedup" in row else ""
    report.reached(
        f"{row['width']:>3} nodes: {', '.join(parts)}{faster}; floor {1e3 * row['floor_seconds']:.1f} ms",
        row.get("of_floor"),
    )


def options(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", **MODEL)
    shared(p, "dtype", draft_bits=4)
    p.add_argument(
        "--held", choices=("expanded", "packed"), default="expanded", help="how rounded weights are kept"
    )
    p.add_argument("--widths", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    p.add_argument("--prefix", type=int, default=200, help="committed tokens before the tree")
    p.add_argument("--temperature", type=float, default=1.0)
    p.add_argument("--rounds", type=int, default=6, help="steps in a row, in three turns")


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Time steps of every width and tell."""
    capacity = args.prefix + max(args.widths)
    report.progress("loading the draft twice")
    packed = args.held == "packed" and args.draft_bits < 16
    plain, taken = (
        open_draft(args.model, args.draft_bits, args.dtype, capacity, expand=not packed) for _ in range(2)
    )
    floor = measure_floor(plain, args.dtype, args.draft_bits if packed else None)
    report.ceiling(
        f"{1e3 * floor.nbytes / floor.bytes_per_s:.1f} ms to read {format_bytes(floor.nbytes)} of weights at "
        f"{format_bytes(floor.bytes_per_s)}/s; {2e3 * floor.weights / floor.flops_per_s:.2f} ms a node to "
        f"multiply at {floor.flops_per_s / 1e9:.0f} GFLOP/s"
    )
    vocabulary = plain.skeleton.vocab_size
    models: dict[str, DraftModel | None] = {"transformers": plain.tree_model, "lean": taken.lean(capacity)}
    ways = {
        name: Steps(model, new_scorer(vocabulary, args.temperature), args.prefix)
        for name, model in models.items()
        if model is not None
    }
    if "lean" not in ways:
        report.note("this draft is not of a plain shape: it keeps transformers' forward")
    rows = measure(ways, floor, args.widths, args.rounds)
    for row in rows:
        show(row, report)
    summary = {
        **report.head(args, "draft_bits", "held", "dtype", "prefix", "temperature"),
        "draft": model_name(args.model),
        "weight_bytes": floor.nbytes,
        "read_bytes_per_s": floor.bytes_per_s,
        "flops_per_s": floor.flops_per_s,
        "steps": rows,
    }
    report.record(summary)
    for draft in (plain, taken):
        draft.close()
    return summary


main = Command("draft", "What a draft step costs.", options, bench)

if __name__ == "__main__":
    sys.exit(main())
