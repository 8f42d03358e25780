"""How a model rounded to few bits agrees with itself: several ways to round groups of 64.

    python -m bench.rounding [MODEL] [--bits 4 3 2] [--prompts N]

The model answers prompts greedily; then each rounding of its decoder matrices reads the same answers, and
its next-token distributions are compared with the model's own: Kullback-Leibler divergence in nats, and
how often the likeliest token is the same. That agreement is what a substitute draft lives on. All take half
a bit more than their codes. NF4 is bitsandbytes' own; half-quadratic is HQQ (Badri and Shaji 2023).
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from rich.table import Table

from bench.lib.command import MODEL, Command, shared
from bench.lib.report import Report, model_name, read_prompts
from offspec.checkpoint import open_checkpoint
from offspec.model.quantize.calibration import TEXT, InputMoments
from offspec.model.quantize.rounding import packed_bytes, rounded
from offspec.model.tokenizer import TextCodec, load_tokenizer
from offspec_kernels.dequant.grouped import GROUP

Rounding = Callable[[str, torch.Tensor], torch.Tensor]


def nf4(name: str, weight: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    codes, state = quantize_4bit(weight, quant_type="nf4", blocksize=64)
    out: torch.Tensor = dequantize_4bit(codes, state)
    return out


def plain_groups(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Even steps between each group's extremes, nothing fitted."""
    groups = weight.float().view(-1, GROUP)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    step = ((high - low) / ((1 << bits) - 1)).clamp_min(1e-9)
    return (((groups - low) / step).round() * step + low).view(weight.shape)


def half_quadratic(
    weight: torch.Tensor, bits: int, matter: torch.Tensor | None = None, rounds: int = 20
) -> torch.Tensor:
    """The offset that makes the errors sparse, in the sense of the p-norm of 0.7; steps span the extremes.

    In turn: what of the error the norm lets stand, and the offset that leaves no more than that on average.
    Errors are in units of half the group's range. matter broadcasts to the weight's shape.
    """
    groups, last, strength = weight.float().view(-1, GROUP), (1 << bits) - 1, 10.0
    counts = torch.ones(1) if matter is None else matter / matter.mean() + 1e-4
    counts = counts.expand(weight.shape).reshape(-1, GROUP)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    step, unit, offset = ((high - low) / last).clamp_min(1e-9), ((high - low) / 2).clamp_min(1e-9), low
    for _ in range(rounds):
        levels = ((groups - offset) / step).round().clamp_(0, last) * step
        error = (groups - levels - offset) / unit
        size = error.abs().clamp_min(1e-8)
        stands = error.sign() * (size - size.pow(-0.3) / strength).clamp_min(0) * unit
        offset = (counts * (groups - stands - levels)).sum(1, keepdim=True) / counts.sum(1, keepdim=True)
        strength *= 1.01
    codes = ((groups - offset) / step).round().clamp_(0, last)
    return (codes * step + offset).view(weight.shape)


def roundings(bits: int, seen: InputMoments) -> dict[str, Rounding]:
    """Every way to round to so many bits, by its title."""
    found: dict[str, Rounding] = {
        "nearest, between extremes": lambda name, w: plain_groups(w, bits),
        "half-quadratic": lambda name, w: half_quadratic(w, bits),
        "least squares": lambda name, w: rounded(w, bits),
        "half-quadratic, calibrated": lambda name, w: half_quadratic(w, bits, seen.importance(name, w)),
        "least squares, calibrated": lambda name, w: rounded(w, bits, seen.importance(name, w)),
    }
    return {"NF4": nf4} | found if bits == 4 else found


class Agreement:
    """Answers of a model, and its distributions along them."""

    def __init__(self, model: Any, codec: TextCodec, prompts: list[str], tokens: int) -> None:
        self.model = model
        self.texts: list[tuple[torch.Tensor, int]] = []
        for prompt in prompts:
            ids = torch.tensor([codec.encode_prompt(prompt)])
            with torch.inference_mode():
                answer = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
                )
            self.texts.append((answer, ids.shape[1]))
        self.truth = self.log_probs()

    def log_probs(self) -> torch.Tensor:
        """[positions, V] along all answers."""
        with torch.inference_mode():
            rows = [self.model(ids).logits[0, start - 1 : -1].float() for ids, start in self.texts]
        return torch.cat(rows).log_softmax(-1)

    def measure(self) -> dict[str, float]:
        rounded = self.log_probs()
        divergence = (self.truth.exp() * (self.truth - rounded)).sum(-1).mean()
        same = (self.truth.argmax(-1) == rounded.argmax(-1)).float().mean()
        return {"divergence_nats": float(divergence), "same_top_token": float(same)}


def moments(model: Any, codec: TextCodec) -> InputMoments:
    gathered = InputMoments(model)
    with torch.inference_mode():
        model(torch.tensor([codec.encode_prompt(TEXT, raw=True)]))
    gathered.close()
    return gathered


def options(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", **MODEL)
    shared(p, "tokens", prompts=14)
    p.add_argument("--bits", type=int, nargs="+", choices=(4, 3, 2), default=[4, 3, 2])


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Measure every rounding and tell."""
    from transformers import AutoModelForCausalLM

    checkpoint = open_checkpoint(args.model, unpack=True)
    codec = TextCodec(load_tokenizer(checkpoint.folder), checkpoint.folder, checkpoint.config)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.bfloat16).eval()
    report.ceiling("0 nats and 1.000 the same: a draft that is the target")
    agreement = Agreement(model, codec, [p.prompt for p in read_prompts(args.prompts)], args.tokens)
    seen = moments(model, codec)
    inner = [name for name, p in model.named_parameters() if ".layers." in name and p.dim() == 2]
    original = {name: model.get_parameter(name).data.clone() for name in inner}
    results: dict[str, dict[str, Any]] = {}
    table = Table("bits", "MB", "rounding", "divergence, nats", "same top token")
    for bits in args.bits:
        nbytes = sum(packed_bytes(weight.shape, bits) for weight in original.values())
        found = dict[str, dict[str, float]]()
        for title, rounding in roundings(bits, seen).items():
            report.progress(f"{bits} bits, {title}")
            for name in inner:
                model.get_parameter(name).data.copy_(rounding(name, original[name]))
            found[title] = one = agreement.measure()
            figures = f"{one['divergence_nats']:.4f}", f"{one['same_top_token']:.4f}"
            table.add_row(str(bits), f"{nbytes / 1e6:.0f}", title, *figures)
        best = found["least squares, calibrated"]["same_top_token"]
        report.reached(f"{bits} bits, as substitutes have them: same top token", best)
        results[str(bits)] = {"bytes": nbytes, "roundings": found}
    report.out.print(table)
    head = {**report.head(args), "model": model_name(args.model)}
    summary = {**head, "positions": len(agreement.truth), "bits": results}
    report.record(summary)
    return summary


main = Command("rounding", "How roundings agree with the model they round.", options, bench)

if __name__ == "__main__":
    sys.exit(main())
