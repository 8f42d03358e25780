"""What layers with a state cost a pass, and whether guesses are believed as far as without them.

    python -m bench.hybrid [--target FOLDER] [--nodes 64 256 512] [--tokens 96] [--noise 0 0.02 0.05]

Pass: a random hybrid (layers of the `hybrid` shape of `bench.lib.random_model`, built on the first run), in
memory. Trees of each size are taken through them, and the seconds within scans and convolutions
are set against those of the products. Memory is the most that the process held, above what the smallest tree
took, beside the bytes that rows of a tree are stated to take.

Guesses: a small hybrid and a small model of attention alone, both random. Each drafts for itself, with its
weights disturbed by noise. How many tokens a pass gives may depend on how often the best guess is right, and
not on the kind of layers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from bench.lib import random_model
from bench.lib.command import Command, shared
from bench.lib.drafting import always_drafting
from bench.lib.report import Report, grid, ratio

if TYPE_CHECKING:
    from offspec.model.loaded import LoadedModel

_LAYERS = 8  # of the random hybrid, in memory
_PARENTS = 8  # rows back that a node's parent may be: bushy, and some ten deep
_REPEATS = 5
_SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_STATES = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}  # fmt: skip
_SMALL = {"hybrid": ("qwen3_5_text", _STATES), "attention": ("qwen3", {})}


class Spent:
    """Seconds within functions while they are watched."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def watch(self, **places: str) -> Iterator[None]:
        """Each function by the module that calls it, as "module.name"."""
        with mock.patch.multiple("offspec.model.recurrence.state", **dict(map(self._timed, places.items()))):
            yield

    def _timed(self, place: tuple[str, str]) -> tuple[str, Any]:
        import offspec.model.recurrence.state as state

        name, what = place
        function = getattr(state, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - began

        return name, timed


def load_layers(folder: Path, most: int) -> LoadedModel:
    """The model with its layers in memory."""
    import torch

    from offspec.checkpoint import open_checkpoint
    from offspec.model.loaded import LoadedModel
    from offspec_planners.placement import Placement, spread

    checkpoint = open_checkpoint(str(folder))
    target = LoadedModel(checkpoint.folder, checkpoint.tensors, torch.bfloat16, torch.device("cpu"))
    count = len(target.layers)
    placement = Placement.in_memory(count, spread(count, count), 0)
    target.load(placement, 2 * most, lambda done, total: None)
    return target


def run_tree(target: LoadedModel, nodes: int) -> float:
    """Seconds of a pass with a bushy tree behind a prompt of two tokens."""
    import torch

    from offspec.model.attention import TreeContext
    from offspec.sampling.token_tree import TokenTree

    random = torch.Generator().manual_seed(nodes)
    parents = [-1] + [
        int(torch.randint(max(0, n - _PARENTS), n, (), generator=random)) for n in range(1, nodes)
    ]
    tokens = torch.randint(3, target.skeleton.vocab_size, (nodes,), generator=random).tolist()
    tree = TokenTree.build(tokens, parents, [0.0] * nodes)
    model = target.tree_model
    position = model.cache.length + torch.from_numpy(tree.depth)
    context = TreeContext(model.cache.length, position, 0, torch.from_numpy(tree.ancestors()))
    began = time.perf_counter()
    with torch.no_grad():
        model.hidden(torch.tensor(tokens), context)
    seconds = time.perf_counter() - began
    model.cache.rewind(model.cache.length)
    return seconds


def measure_passes(folder: Path, sizes: list[int], report: Report) -> list[dict[str, Any]]:
    """A row for each number of nodes."""
    import torch

    from bench.stream.floor import Floor
    from offspec.core import memory

    target = load_layers(folder, max(sizes))
    row_bytes = target.state_bytes(1, 0) - target.state_bytes(0, 0)
    with torch.no_grad():
        from offspec.model.attention import TreeContext

        target.tree_model.hidden(torch.tensor([5, 6]), TreeContext.chain(2, target.device))
        target.tree_model.cache.commit(2, [])
    floor = Floor(folder, target.dtype, target.device)
    found = list[dict[str, Any]]()
    for nodes in sorted(sizes):
        gemm = floor.measure(nodes).gemm
        report.ceiling(f"{nodes} nodes: products take {1e3 * gemm:.0f} ms")
        run_tree(target, nodes)
        spent, times = Spent(), list[float]()
        with spent.watch(tree_scan="scan", tree_conv="conv"):
            times = [run_tree(target, nodes) for _ in range(_REPEATS)]
        shares = {what: seconds / _REPEATS for what, seconds in spent.seconds.items()}
        row = {
            "nodes": nodes,
            "gemm_seconds": gemm,
            "pass_seconds": min(times),
            "peak_bytes": memory.peak_bytes(),
        }
        row |= {f"{what}_seconds": seconds for what, seconds in shares.items()}
        row["stated_row_bytes"] = row_bytes * nodes
        found.append(row)
        told = ", ".join(f"{what} {1e3 * seconds:.0f} ms" for what, seconds in shares.items())
        told = f"{nodes} nodes: pass {1e3 * min(times):.0f} ms, of it {told}; these by the products"
        report.reached(told, ratio(sum(shares.values()), gemm))
    least = found[0]
    for row in found[1:]:
        more = row["nodes"] - least["nodes"]
        grown = (row["peak_bytes"] - least["peak_bytes"]) / more
        report.note(f"{row['nodes']} nodes: {grown / 1e3:.0f} KB more memory a node, of which "
                    f"{row_bytes / 1e3:.0f} KB are kept for the commit")  # fmt: skip
    state = (target.state_bytes(0, 1) - target.state_bytes(0, 0)) / 1e6
    report.note(f"a state takes {state:.1f} MB, whatever the number of nodes")
    target.close()
    return found


def write_small(folder: Path, kind: str, noise: float) -> Path:
    """A small random model; noise: of its weights, as a part of each."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family, more = _SMALL[kind]
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **_SIZES, **more), dtype=torch.float32
    )
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(0, 1.5 * weight.shape[-1] ** -0.5)
        torch.manual_seed(2)
        for weight in model.parameters():
            weight.mul_(1 + noise * torch.randn_like(weight))
    model.save_pretrained(folder)
    random_model.write_tokenizer(folder, _SIZES["vocab_size"])
    return folder


def measure_guesses(args: argparse.Namespace, scratch: Path, report: Report) -> list[dict[str, Any]]:
    """Tokens a pass by kind of layers and noise; with one guess a pass, how often it is right."""
    import offspec
    from offspec import SamplingParams

    found = list[dict[str, Any]]()
    prompts = [[3 + (7 * i * i + 11 * p + i) % 250 for i in range(24)] for p in range(args.prompts or 4)]
    params = SamplingParams(0.0, max_tokens=args.tokens, ignore_eos=True)
    for kind in _SMALL:
        target = write_small(scratch / kind, kind, 0.0)
        for noise in args.noise:
            draft = write_small(scratch / f"{kind} {noise}", kind, noise)
            row: dict[str, Any] = {"layers": kind, "noise": noise}
            for name, budget, width in (("right", 2, 1), ("tokens_per_pass", args.budget, args.width)):
                with offspec.load(
                    str(target), draft=str(draft), draft_bits=16, dtype="float32", budget=budget, width=width,
                    context=512, device="cpu", learn=False,
                ) as engine:  # fmt: skip
                    always_drafting(engine)
                    results = [engine.generate(prompt, params) for prompt in prompts]
                row[name] = ratio(sum(r.tokens for r in results), sum(r.passes for r in results))
            row["right"] -= 1
            found.append(row)
            report.progress(
                f"{kind}, noise {noise}: right {row['right']:.2f}, {row['tokens_per_pass']:.2f} a pass"
            )
    return found


def options(p: argparse.ArgumentParser) -> None:
    shared(p, "target", "prompts", tokens=96, budget=64, width=8)
    p.add_argument("--nodes", type=int, nargs="+", default=[64, 256, 512])
    p.add_argument("--noise", type=float, nargs="+", default=[0.0, 0.02, 0.05, 0.1])
    p.add_argument("--only", choices=("passes", "guesses"))


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Measure and tell."""
    from dataclasses import replace

    from offspec.core.cache_dir import cache_root

    summary = report.head(args)
    if args.only != "guesses":
        folder = args.target or cache_root() / "random" / "hybrid"
        shape = replace(random_model.SHAPES["hybrid"], layers=_LAYERS)
        summary["passes"] = measure_passes(random_model.build(shape, folder), args.nodes, report)
    if args.only != "passes":
        report.ceiling(f"{args.budget} tokens a pass: the nodes of a tree")
        with tempfile.TemporaryDirectory() as scratch:
            summary["guesses"] = measure_guesses(args, Path(scratch), report)
        view = grid("guesses of a disturbed copy", "layers", "noise", "best guess right", "tokens a pass")
        for row in summary["guesses"]:
            view.add_row(
                row["layers"], f"{row['noise']:g}", f"{row['right']:.2f}", f"{row['tokens_per_pass']:.2f}"
            )
        report.out.print(view)
    report.record(summary, device="cpu")
    return summary


main = Command("hybrid", "What layers with a state cost, and what guesses are worth.", options, bench)

if __name__ == "__main__":
    sys.exit(main())
