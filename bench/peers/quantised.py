"""The contenders of the peers bench whose target is quantised: offspec on an NF4 pack, and llama.cpp in Q4_0.

The draft is the small model for all: offspec rounds it to 4 bits, llama.cpp has its own GGUF file. Which
tokens come differs between NF4 and Q4_0, so speeds are compared, and texts are not.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.lib.cgroup import BenchError
from bench.lib.process import child
from bench.lib.report import Prompt
from bench.lib.streamed import ask, pack_of
from bench.peers import llama as peers_llama
from bench.peers.llama import LlamaFiles

PACKED, STORED, LLAMA, LLAMA_DRAFTED = "offspec_pack", "offspec_gguf", "llama_cpp", "llama_cpp_drafted"
QUANTISED = (PACKED, STORED, LLAMA, LLAMA_DRAFTED)
QUANTISED_TITLES = {
    PACKED: "offspec, its own pack",
    STORED: "offspec, Q4_0 GGUF",
    LLAMA: "llama.cpp, Q4_0",
    LLAMA_DRAFTED: "llama.cpp, speculative",
}
_DRAFT_BITS = 16  # as llama.cpp has the draft; the target, which is rounded, does not say the same


@dataclass(frozen=True, slots=True)
class Quantised:
    """The target in few bits, as far as it is wanted: offspec's pack, and what llama.cpp has."""

    pack: Path | None
    llama: LlamaFiles | None

    @property
    def layer_bytes(self) -> int:
        """Of the pack, or without one of llama.cpp's file."""
        if self.pack is None:
            return self.llama.layer_bytes if self.llama else 0
        return sum(self._files[:-1])  # a file holds a layer, and the largest of all what is no layer

    @property
    def _files(self) -> list[int]:
        """Sizes of the pack's files, the largest last."""
        files = self.pack.glob("*.safetensors") if self.pack else ()
        return sorted(file.stat().st_size for file in files)

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"quantised_layer_bytes": self.layer_bytes}
        if self.pack is not None:
            found["pack_bytes"] = sum(self._files)
        return {**found, **(self.llama.sizes() if self.llama else {})}


def prepare(args: argparse.Namespace, target: Path) -> Quantised | None:
    """Make the pack and the GGUF file where they are wanted and missing. Raises BenchError."""
    wanted = [name for name in args.only if name in QUANTISED]
    if not wanted:
        return None
    pack = Path(pack_of(target, args.pack)) if PACKED in wanted else None
    if wanted == [PACKED]:
        return Quantised(pack, None)
    if args.llama_cpp is None:
        raise BenchError(f"{wanted[-1]} needs --llama-cpp, a {peers_llama.BUILDING}")
    words = (str(target), "--model", args.model, "--prompts", str(args.prompts))
    return Quantised(pack, LlamaFiles.of(args.llama_cpp.resolve(), child("bench.peers.llama_models", *words)))


def settings(contender: str, lengths: Sequence[int], *, fits: bool) -> dict[str, dict[str, Any]]:
    """What a contender is tried with, by names. lengths, fits: see `bench.peers.llama.settings`."""
    if contender in (PACKED, STORED):
        planned = {"budget": None, "width": None}
        return {
            "budget and width as given": {},
            "as planned": planned,
            "as planned, draft in 4 bits": {**planned, "draft_bits": 4},
        }
    tried = peers_llama.settings(len(os.sched_getaffinity(0)), lengths, fits=fits)
    return tried[peers_llama.ALONE if contender == LLAMA else peers_llama.DRAFTED]


def run(
    args: argparse.Namespace,
    quantised: Quantised,
    contender: str,
    chosen: Mapping[str, Any],
    group: Sequence[tuple[int, Prompt]],
    temperature: float,
) -> dict[str, Any]:
    """One measured process and its figures. Raises BenchError."""
    if contender == PACKED:
        assert quantised.pack is not None, "who needs the pack has it"
        return _run_offspec(args, quantised.pack, chosen, group, temperature)
    assert quantised.llama is not None, "who needs llama.cpp's files has them"
    if contender == STORED:
        return _run_offspec(args, quantised.llama.target, chosen, group, temperature)
    ((number, prompt),) = group
    job = {
        "text": quantised.llama.texts[prompt.id],
        "tokens": args.off_tokens if contender == LLAMA else args.tokens,
        "temperature": temperature,
        "seed": args.seed + number,
        "context": args.context,
        "seconds": args.peer_seconds,
        **chosen,
    }
    return peers_llama.run(args, quantised.llama, prompt.id, job)


def _run_offspec(
    args: argparse.Namespace,
    model: Path,
    chosen: Mapping[str, Any],
    group: Sequence[tuple[int, Prompt]],
    temperature: float,
) -> dict[str, Any]:
    drafting = {"draft": args.model, "draft_bits": _DRAFT_BITS, **chosen}
    asked = argparse.Namespace(**{**vars(args), **drafting})
    return ask(asked, model, group, temperature, True)
