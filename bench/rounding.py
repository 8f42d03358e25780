"""How a 4-bit rounding of a model agrees with the model: NF4 and groups of 64, with and without calibration.

    python -m bench.rounding [MODEL] [--prompts N]

The model answers prompts greedily; then each rounding of its decoder matrices reads the same answers, and
its next-token distributions are compared with the model's own: Kullback-Leibler divergence in nats, and
how often the likeliest token is the same. That agreement is what a substitute draft lives on. All take
4.5 bits a weight. NF4 is bitsandbytes' own.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bench.harness import Report, command_line, environment, read_prompts, write_result
from offspec.checkpoint import open_checkpoint
from offspec.model.calibration import TEXT, InputMoments
from offspec.model.packing import pack, unpack
from offspec.text.codec import TextCodec, load_tokenizer

NAME = "rounding"
Rounding = Callable[[str, torch.Tensor], torch.Tensor]


def nf4(name: str, weight: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    codes, state = quantize_4bit(weight, quant_type="nf4", blocksize=64)
    out: torch.Tensor = dequantize_4bit(codes, state)
    return out


def plain_groups(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Sixteen even steps between each group's extremes, nothing fitted."""
    groups = weight.float().view(-1, 64)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    step = ((high - low) / 15).clamp_min(1e-9)
    return (((groups - low) / step).round() * step + low).view(weight.shape)


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


def main() -> int:
    parser = argparse.ArgumentParser(description="How 4-bit roundings agree with the model they round.")
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--prompts", type=int, default=14, help="how many prompts, mixed by kind")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens an answer")
    parser.add_argument("--json", type=Path, help="result file (default bench/results/rounding.json)")
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM

    checkpoint = open_checkpoint(args.model)
    codec = TextCodec(load_tokenizer(checkpoint.folder), checkpoint.folder, checkpoint.config)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.bfloat16).eval()
    report = Report()
    report.ceiling("0 nats and 1.000 the same: a draft that is the target")
    agreement = Agreement(model, codec, [p.prompt for p in read_prompts(args.prompts)], args.tokens)
    seen = moments(model, codec)
    roundings: dict[str, Rounding] = {
        "NF4, blocks of 64": nf4,
        "groups of 64, between extremes": plain_groups,
        "groups of 64, least squares": lambda name, w: unpack(pack(w)),
        "groups of 64, calibrated": lambda name, w: unpack(pack(w, seen.importance(name, w))),
    }
    inner = [name for name, p in model.named_parameters() if ".layers." in name and p.dim() == 2]
    original = {name: model.get_parameter(name).data.clone() for name in inner}
    results: dict[str, dict[str, float]] = {}
    for title, rounding in roundings.items():
        for name in inner:
            model.get_parameter(name).data.copy_(rounding(name, original[name]))
        results[title] = agreement.measure()
    table = Table("4.5 bits a weight", "divergence, nats", "same top token")
    for title, found in results.items():
        table.add_row(title, f"{found['divergence_nats']:.4f}", f"{found['same_top_token']:.4f}")
    best = results["groups of 64, calibrated"]["same_top_token"]
    report.reached("calibrated groups of 64: same top token", best)
    report.out.print(table)
    summary = {"bench": NAME, "model": args.model, "positions": len(agreement.truth), "roundings": results}
    command = command_line(f"bench.{NAME}", sys.argv[1:])
    write_result(NAME, {**summary, "command": command, "environment": environment()}, args.json)
    report.last_line(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
