"""Contenders of the peers bench, the settings to try with each, and their measured processes.

If the target is quantized, every contender uses the small model as its draft: offspec keeps it in 16 bits, as
llama.cpp does, or quantizes it to 4. Tokens differ between formats, so speeds are compared and texts are not.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.lib.cgroup import BenchError
from bench.lib.process import child, measured_argv
from bench.lib.report import Prompt
from bench.lib.streamed import ask, numbered, pack_of
from bench.peers import env as peers_env
from bench.peers import llama
from bench.peers.llama import LlamaFiles
from bench.peers.worker import one_line
from offspec.core.errors import OffspecError
from offspec.core.values import parse_bytes
from offspec_planners.units import format_bytes

Group = Sequence[tuple[int, Prompt]]  # prompts with their numbers, which determine the seeds

OFFSPEC, OFF, ACCELERATE, ASSISTED = "offspec", "offspec_off", "accelerate", "assisted"
PACKED, STORED, LLAMA, LLAMA_DRAFTED = "offspec_pack", "offspec_gguf", "llama_cpp", "llama_cpp_drafted"
PLAIN = (OFFSPEC, OFF, ACCELERATE, ASSISTED)  # contenders with the target in bfloat16
QUANTIZED = (PACKED, STORED, LLAMA, LLAMA_DRAFTED)
TITLES = {
    OFFSPEC: "offspec",
    OFF: "offspec, draft off",
    ACCELERATE: "accelerate, disk",
    ASSISTED: "assisted generation",
    PACKED: "offspec, its own pack",
    STORED: "offspec, Q4_0 GGUF",
    LLAMA: "llama.cpp, Q4_0",
    LLAMA_DRAFTED: "llama.cpp, speculative",
}
CONTENDERS = tuple(TITLES)


@dataclass(frozen=True, slots=True)
class Variant:
    """One setting of a contender: its display name, and settings for its worker."""

    contender: str
    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BenchSetup:
    """Programs and models of the selected contenders.

    Args:
        target, recipe, draft: The widened model, and the draft for it in bfloat16.
        python: Interpreter of the peers' environment.
        error: Why there is no such environment.
        pack: offspec's own pack.
        llama: llama.cpp's programs and files.
    """

    target: Path
    recipe: Mapping[str, Any]
    draft: Path
    python: Path | None = None
    error: dict[str, str] | None = None
    pack: Path | None = None
    llama: LlamaFiles | None = None

    @property
    def quantized_sizes(self) -> dict[str, int]:
        """Bytes of the pack and of llama.cpp's files, and of the layers in one of them."""
        found = self.llama.sizes() if self.llama else {}
        if self.pack is not None:
            files = sorted(file.stat().st_size for file in self.pack.glob("*.safetensors"))
            # A file holds a layer; the largest file holds everything that is not in a layer.
            return {**found, "pack_bytes": sum(files), "quantized_layer_bytes": sum(files[:-1])}
        return {**found, "quantized_layer_bytes": self.llama.layer_bytes} if self.llama else {}


def prepare(args: argparse.Namespace, target: Path, recipe: Mapping[str, Any], draft: Path) -> BenchSetup:
    """Prepare the selected contenders. A failure to create the environment is recorded as their error."""
    python, error = None, None
    if {ACCELERATE, ASSISTED} & set(args.only):
        try:
            python = peers_env.ensure()
        except OffspecError as caught:
            error = failure(caught, "environment")
    pack = Path(pack_of(target, args.pack)) if PACKED in args.only else None
    files = None
    if wanted := [name for name in args.only if name in (STORED, LLAMA, LLAMA_DRAFTED)]:
        if args.llama_cpp is None:
            raise BenchError(f"{wanted[0]} needs --llama-cpp, a {llama.BUILDING}")
        words = (str(target), "--model", args.model, "--prompts", str(args.prompts))
        files = LlamaFiles.of(args.llama_cpp.resolve(), child("bench.peers.llama_models", *words))
    return BenchSetup(target, recipe, draft, python, error, pack, files)


def failure(error: Exception, kind: str) -> dict[str, str]:
    """Return an error for results: its kind, and one line."""
    return {"kind": kind, "message": one_line(str(error))}


def variants(args: argparse.Namespace, setup: BenchSetup, contender: str) -> list[Variant]:
    """Return the settings to try with a contender; the fastest is used, so that none is limited by its
    settings.

    args: `peer_memory` limits the weights, including the draft's, that a peer keeps in RAM. The rest of the
    limit is for the interpreter, its libraries, and the page cache of mapped weights. `draft_lengths` are
    tried with llama.cpp.
    """
    return [Variant(contender, name, found) for name, found in _settings(args, setup, contender).items()]


def _settings(args: argparse.Namespace, setup: BenchSetup, contender: str) -> dict[str, dict[str, Any]]:
    if contender in (OFFSPEC, OFF):
        return {"": {}}
    if contender in (PACKED, STORED):
        planned = {"draft_bits": 16, "budget": None, "width": None}
        return {
            "budget and width as given": {"draft_bits": 16},
            "as planned": planned,
            "as planned, draft in 4 bits": {**planned, "draft_bits": 4},
        }
    if contender in (LLAMA, LLAMA_DRAFTED):
        fits = setup.llama is None or setup.llama.target.stat().st_size < parse_bytes(args.memory)
        alone, drafted = llama.settings(len(os.sched_getaffinity(0)), args.draft_lengths, fits=fits)
        return alone if contender == LLAMA else drafted
    in_ram = parse_bytes(args.peer_memory)
    documented, mapped, copied = placements(setup.recipe, in_ram)
    if contender == ACCELERATE:
        return {
            f"auto, {format_bytes(in_ram)} in RAM": {"placement": documented},
            "all layers on disk": {"placement": mapped},
            "some layers copied to RAM": {"placement": copied},
        }
    # Mapped weights may be evicted, so they need not leave memory for the draft; copied weights must.
    size = sum(file.stat().st_size for file in setup.draft.glob("*.safetensors"))
    _, _, beside_draft = placements(setup.recipe, max(in_ram - size, 0))
    draft = {"draft": str(setup.draft)}
    chains: dict[str, dict[str, Any]] = {
        "its defaults": {},
        "heuristic from 10": _chain(10, "heuristic"),
        "constant 10": _chain(10, "constant"),
        "constant 20": _chain(20, "constant"),
    }
    return {"auto, its defaults": {"placement": documented, **draft}} | {
        f"copied to RAM, {name}": {"placement": beside_draft, "assistant": chain, **draft}
        for name, chain in chains.items()
    }


def _chain(tokens: int, schedule: str) -> dict[str, Any]:
    """Return options of a draft that always generates its whole chain: steps are cheap relative to a pass."""
    return {
        "num_assistant_tokens": tokens,
        "num_assistant_tokens_schedule": schedule,
        "assistant_confidence_threshold": 0.0,
    }


def placements(
    recipe: Mapping[str, Any], in_ram: int
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return three placements of a Llama's modules: as in accelerate's documentation, all layers on disk, and
    as many layers as fit in `in_ram` bytes with the head, copied so that they stay.

    The embedding is always placed in RAM (transformers takes the model's device from it), but only mapped:
    just the rows in use are read.
    """
    layers = len(recipe["layer_files"])
    kept = max(in_ram - recipe["head_bytes"], 0) // (recipe["layer_bytes"] // layers)
    outer = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")

    def place(resident: int) -> dict[str, str]:
        return {**outer, **{f"model.layers.{i}": "cpu" if i < resident else "disk" for i in range(layers)}}

    return {"max_memory": in_ram}, {"device_map": place(0)}, {"device_map": place(kept), "copy": True}


def run(
    args: argparse.Namespace, setup: BenchSetup, variant: Variant, group: Group, temperature: float
) -> dict[str, Any]:
    """Return the figures of one measured process, or {"error": {kind, message}}."""
    place = {"contender": variant.contender, "variant": variant.name, "temperature": temperature}
    start = time.perf_counter()
    try:
        found = _run(args, setup, variant, group, temperature)
    except BenchError as error:
        late = time.perf_counter() - start >= args.peer_seconds
        kind = "timeout" if late else "killed" if "was killed" in str(error) else "failed"
        found = {"error": failure(error, kind)}
    return {**found, **place}


def _run(
    args: argparse.Namespace, setup: BenchSetup, variant: Variant, group: Group, temperature: float
) -> dict[str, Any]:
    name, settings = variant.contender, variant.settings
    if name in (OFFSPEC, OFF):
        return ask(args, setup.target, group, temperature, name == OFFSPEC)
    tokens = args.tokens if name in (ASSISTED, LLAMA_DRAFTED) else args.off_tokens
    job = {"temperature": temperature, "seconds": args.peer_seconds, **settings}
    if name in (ACCELERATE, ASSISTED):
        job |= {"target": str(setup.target), "max_tokens": tokens, "seed": args.seed}
        with tempfile.TemporaryDirectory() as scratch:  # accelerate requires a folder; it stays empty
            job |= {"scratch": scratch, "prompts": numbered(group)}
            # Isolated (-I): neither this project nor the user's own packages are on its path.
            return measured_argv(args, [str(setup.python), "-I", str(peers_env.WORKER), json.dumps(job)])
    if name == PACKED:
        assert setup.pack is not None, "prepared for this contender"
        return ask(_with(args, settings), setup.pack, group, temperature, True)
    assert setup.llama is not None, "prepared for these contenders"
    if name == STORED:
        return ask(_with(args, settings), setup.llama.target, group, temperature, True)
    ((number, prompt),) = group
    job |= {"text": setup.llama.texts[prompt.id], "tokens": tokens, "context": args.context}
    return llama.run(args, setup.llama, prompt.id, {**job, "seed": args.seed + number})


def _with(args: argparse.Namespace, settings: Mapping[str, Any]) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(args), "draft": args.model, **settings})
