"""The contenders of the peers bench, the settings each is tried with, and their measured processes."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.lib.cgroup import BenchError
from bench.lib.process import measured
from bench.lib.report import Prompt
from bench.lib.streamed import ask, numbered
from bench.peers import env as peers_env
from bench.peers import quantised as peers_quantised
from bench.peers.quantised import QUANTISED, QUANTISED_TITLES, Quantised
from bench.peers.worker import one_line
from offspec.core.config import format_bytes, parse_bytes
from offspec.core.errors import OffspecError

Group = Sequence[tuple[int, Prompt]]  # prompts with their numbers, from which seeds are made

OFFSPEC, OFF, ACCELERATE, ASSISTED, AIRLLM = "offspec", "offspec_off", "accelerate", "assisted", "airllm"
PLAIN = (OFFSPEC, OFF, ACCELERATE, ASSISTED, AIRLLM)  # with the target in bfloat16
CONTENDERS = (*PLAIN, *QUANTISED)
TITLES = {
    OFFSPEC: "offspec",
    OFF: "offspec, draft off",
    ACCELERATE: "accelerate, disk",
    ASSISTED: "assisted generation",
    AIRLLM: "AirLLM",
    **QUANTISED_TITLES,
}


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to set a contender up: a name for people, and what its worker is told."""

    contender: str
    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Scene:
    """What all contenders share: the target and its recipe, the draft, and each peer's needs.

    airllm: its folders. errors: contenders that cannot even be started, with the reason. quantised: for
    those whose target is.
    """

    target: Path
    recipe: Mapping[str, Any]
    draft: Path
    python: Path | None
    airllm: Mapping[str, str]
    errors: Mapping[str, dict[str, str]]
    quantised: Quantised | None = None


def prepare(target: Path, recipe: Mapping[str, Any], draft: Path, only: Sequence[str]) -> Scene:
    """Make what the wanted contenders need. What cannot be made is an error of that contender alone."""
    python, airllm = None, dict[str, str]()
    errors: dict[str, dict[str, str]] = {}
    peers = [name for name in only if name in (ACCELERATE, ASSISTED, AIRLLM)]
    if peers:
        try:
            python = peers_env.ensure()
        except OffspecError as error:
            errors |= dict.fromkeys(peers, failure(error, "environment"))
    if python and AIRLLM in peers:
        try:
            airllm = peers_env.airllm_folders(python, target, recipe)
        except OffspecError as error:
            errors[AIRLLM] = failure(error, "preparation")
    return Scene(target, recipe, draft, python, airllm, errors)


def failure(error: Exception, kind: str | None = None) -> dict[str, str]:
    """An error as results tell it: its kind, and one line."""
    return {"kind": kind or type(error).__name__, "message": one_line(str(error))}


def variants(args: argparse.Namespace, scene: Scene, contender: str) -> list[Variant]:
    """The settings a contender is tried with; the fastest counts, so that none is hobbled by its settings.

    args: `peer_memory` is for weights, the draft's included, that a peer may keep in RAM. The rest of the
    limit is for the interpreter, its libraries, and the page cache that the mapped weights pass through.
    `draft_lengths` are those that llama.cpp is tried with.
    """
    if contender in QUANTISED:
        llama = scene.quantised.llama if scene.quantised else None
        fits = llama is None or llama.target.stat().st_size < parse_bytes(args.memory)
        found = peers_quantised.settings(contender, args.draft_lengths, fits=fits)
        return [Variant(contender, name, settings) for name, settings in found.items()]
    if contender not in (ACCELERATE, ASSISTED):
        return [Variant(contender, "", {})]
    weights_in_ram = parse_bytes(args.peer_memory)
    if contender == ACCELERATE:
        documented, mapped, copied = placements(scene.recipe, weights_in_ram)
        return [
            Variant(ACCELERATE, f"auto, {format_bytes(weights_in_ram)} in RAM", {"placement": documented}),
            Variant(ACCELERATE, "all layers on disk", {"placement": mapped}),
            Variant(ACCELERATE, "some layers copied to RAM", {"placement": copied}),
        ]
    size = sum(file.stat().st_size for file in scene.draft.glob("*.safetensors"))
    # What is merely mapped may be evicted, so it need not leave room for the draft; what is copied must.
    documented, _, _ = placements(scene.recipe, weights_in_ram)
    _, _, copied = placements(scene.recipe, max(weights_in_ram - size, 0))
    draft = {"draft": str(scene.draft)}
    chains: dict[str, dict[str, Any]] = {
        "its defaults": {},
        "heuristic from 10": _chain(10, "heuristic"),
        "constant 10": _chain(10, "constant"),
        "constant 20": _chain(20, "constant"),
    }
    return [
        Variant(ASSISTED, "auto, its defaults", {"placement": documented, **draft}),
        *(
            Variant(ASSISTED, f"copied to RAM, {name}", {"placement": copied, "assistant": chain, **draft})
            for name, chain in chains.items()
        ),
    ]


def _chain(tokens: int, schedule: str) -> dict[str, Any]:
    """A draft that always writes its whole chain: a step is cheap where a pass takes seconds."""
    return {
        "num_assistant_tokens": tokens,
        "num_assistant_tokens_schedule": schedule,
        "assistant_confidence_threshold": 0.0,
    }


def placements(
    recipe: Mapping[str, Any], in_ram: int
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Three ways to place a Llama's modules: as accelerate's documentation has it, all layers on disk, and
    as many layers as `in_ram` bytes hold beside the head, copied so that they stay.

    The embedding is in RAM by name in all of them (transformers takes the model's device from it), but
    only mapped: the rows in use are all that is read of it.
    """
    layers = len(recipe["layer_files"])
    kept = max(in_ram - recipe["head_bytes"], 0) // (recipe["layer_bytes"] // layers)
    outer = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")

    def place(resident: int) -> dict[str, str]:
        return {**outer, **{f"model.layers.{i}": "cpu" if i < resident else "disk" for i in range(layers)}}

    return {"max_memory": in_ram}, {"device_map": place(0)}, {"device_map": place(kept), "copy": True}


def run(
    args: argparse.Namespace, scene: Scene, variant: Variant, group: Group, temperature: float
) -> dict[str, Any]:
    """One measured process and its figures, or {"error": {kind, message}} in their place."""
    place = {"contender": variant.contender, "variant": variant.name, "temperature": temperature}
    start = time.perf_counter()
    try:
        if variant.contender in (OFFSPEC, OFF):
            on = variant.contender == OFFSPEC
            found = ask(args, scene.target, group, temperature, on)
        elif variant.contender in QUANTISED:
            assert scene.quantised is not None, "a contender that runs was prepared"
            found = peers_quantised.run(
                args, scene.quantised, variant.contender, variant.settings, group, temperature
            )
        else:
            found = _run_peer(args, scene, variant, group, temperature)
    except BenchError as error:
        late = time.perf_counter() - start >= args.peer_seconds
        kind = "timeout" if late else "killed" if "was killed" in str(error) else "failed"
        found = {"error": failure(error, kind)}
    return {**found, **place}


def _run_peer(
    args: argparse.Namespace, scene: Scene, variant: Variant, group: Group, temperature: float
) -> dict[str, Any]:
    lengths = {ACCELERATE: args.off_tokens, ASSISTED: args.tokens, AIRLLM: args.airllm_tokens}
    job = {
        "peer": AIRLLM if variant.contender == AIRLLM else ACCELERATE,
        "target": str(scene.target),
        **(scene.airllm if variant.contender == AIRLLM else {}),
        **variant.settings,
        "temperature": temperature,
        "max_tokens": lengths[variant.contender],
        "seed": args.seed,
        "seconds": args.peer_seconds,
        "prompts": numbered(group),
    }
    with tempfile.TemporaryDirectory() as scratch:  # accelerate asks for a folder; it stays empty
        # Isolated (-I): neither this project's folders nor the user's own packages are on its path.
        argv = [str(scene.python), "-I", str(peers_env.WORKER), json.dumps({**job, "scratch": scratch})]
        line, peaks = measured(args, argv)
    return {**json.loads(line), **peaks}
