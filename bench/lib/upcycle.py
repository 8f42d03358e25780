"""Build an upcycled model: a mixture of experts that says what a small model says (`bench/lib/upcycling.py`).

    python -m bench.lib.upcycle MODEL [OUT] --experts 16 --chosen 4 [--skew 1] [--factor 1]

MODEL is a folder, a hub id, a .gguf file, or `demo`. The folder OUT appears when it is whole: one safetensors
file for each layer, its experts in front, each in one piece (gate, up, down) and at a multiple of 4096 bytes
where its size is one, and a file for the rest. `upcycled.json` in it tells how often experts are chosen.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.lib.cgroup import BenchError
from bench.lib.command import printed
from bench.lib.process import say
from bench.lib.report import read_prompts
from bench.lib.upcycling import ExpertFile, Mixture, expert_files, mixture_config
from bench.lib.widen import progress_line, short_name
from offspec.checkpoint.tensors import bytes_of
from offspec.checkpoint.widen import copy_tokenizer, fingerprint, write_index, write_json
from offspec.checkpoint.write import SafetensorsWriter
from offspec.core.cache_dir import cache_root
from offspec.core.files import new_folder, require_space

if TYPE_CHECKING:
    import torch

    from offspec.checkpoint import Checkpoint

RECIPE = "upcycled.json"


def upcycle(
    checkpoint: Checkpoint,
    out: Path,
    mixture: Mixture,
    texts: Sequence[Sequence[int]],
    *,
    on_write: Callable[[int], None] | None = None,
) -> None:
    """Write the mixture into the folder `out`, which must not exist; it appears there when whole.

    Args:
        texts: Token ids, over which experts are chosen as often as the mixture's skew says.
        on_write: Called with the bytes of every piece written.

    Raises: DiskFullError, UnsupportedModelError, BenchError.
    """
    files = expert_files(checkpoint, mixture)
    if out.exists():
        raise BenchError(f"{out} exists already: remove it, or name another folder")
    require_space(out, total_bytes(files) + (64 << 20), f"the model upcycled to {mixture.name}")
    routers, shares = make_routers(checkpoint.folder, mixture, texts)
    out.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(out) as partial:
        for name, file in files.items():
            with SafetensorsWriter(partial / name, file.entries(), on_write=on_write) as writer:
                for tensor, piece in file.pieces(routers[file.layer] if file.matrices else None):
                    writer.write(tensor, piece)
        config = json.loads((checkpoint.folder / "config.json").read_text("utf-8"))
        write_json(partial / "config.json", mixture_config(config, mixture))
        named = {entry[0]: name for name, file in files.items() for entry in file.entries()}
        write_index(partial, named, total_bytes(files))
        write_json(partial / RECIPE, {**recipe(checkpoint, files, mixture), "shares": shares})
        copy_tokenizer(checkpoint, partial)


def make_routers(
    folder: Path, mixture: Mixture, texts: Sequence[Sequence[int]]
) -> tuple[list[torch.Tensor], list[float]]:
    """Routers [E, H] of the model before widening, by layer; and the share of the choices that an expert has,
    most first, mean over layers."""
    import torch

    from bench.lib.routers import chosen_shares, make_router, mlp_inputs

    inputs = mlp_inputs(folder, texts)
    routers = [
        make_router(hidden, mixture.experts, mixture.chosen, mixture.skew, mixture.seed + layer)
        for layer, hidden in enumerate(inputs)
    ]
    shares = [
        chosen_shares(hidden @ router.T, mixture.chosen).sort(descending=True).values / mixture.chosen
        for hidden, router in zip(inputs, routers, strict=True)
    ]
    return routers, [round(float(share), 5) for share in torch.stack(shares).mean(0)]


def total_bytes(files: dict[str, ExpertFile]) -> int:
    return sum(bytes_of(dtype, shape) for file in files.values() for _, dtype, shape in file.entries())


def recipe(checkpoint: Checkpoint, files: dict[str, ExpertFile], mixture: Mixture) -> dict[str, Any]:
    """What a bench needs to know of the mixture, and whether it still belongs to its source."""
    layers = {name: file for name, file in files.items() if file.matrices}
    return {
        "source": checkpoint.folder.name,
        "fingerprint": fingerprint(checkpoint),
        "mixture": asdict(mixture),
        "layer_files": list(layers),
        "layer_bytes": total_bytes(layers),
        "expert_bytes": next(file.expert_bytes for file in layers.values()),
        "experts_bytes": sum(mixture.experts * file.expert_bytes for file in layers.values()),
        "total_bytes": total_bytes(files),
    }


def calibration_texts(folder: Path) -> list[list[int]]:
    """The bench's prompts as chats. Over answers to them experts are chosen about as often."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    texts = [prompt.prompt for prompt in read_prompts()]
    if tokenizer.chat_template:
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
            for text in texts
        ]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def default_folder(model: str, mixture: Mixture) -> Path:
    """Where an upcycled model is kept when no folder is named: in the user's cache."""
    return cache_root() / "upcycled" / f"{short_name(model)}-{mixture.name}"


def ensure(model: str, out: Path | None, mixture: Mixture, *, force: bool = False) -> tuple[Path, bool]:
    """The folder of the mixture, and whether it had to be built. One that is there is used again.

    Raises BenchError when the folder holds another model or another mixture; `force` replaces it.
    """
    from offspec.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(model, unpack=True)
    out = out or default_folder(model, mixture)
    if out.exists() and not (force and (out / RECIPE).exists()):
        found = read_recipe(out)
        if (found["mixture"], found["fingerprint"]) != (asdict(mixture), fingerprint(checkpoint)):
            raise BenchError(f"{out} was upcycled from another model or to another mixture: pass --force")
        return out, False
    files = expert_files(checkpoint, mixture)  # refuses before anything is removed
    if out.exists():
        shutil.rmtree(out)
    say(f"measuring hidden states of {checkpoint.folder.name}")
    texts = calibration_texts(checkpoint.folder)
    title = f"upcycling {checkpoint.folder.name} to {mixture.experts} experts"
    with progress_line(title, total_bytes(files)) as on_write:
        upcycle(checkpoint, out, mixture, texts, on_write=on_write)
    return out, True


def read_recipe(folder: Path) -> dict[str, Any]:
    """The recipe in an upcycled folder. Raises BenchError when it is no such folder."""
    try:
        found: dict[str, Any] = json.loads((folder / RECIPE).read_text("utf-8"))
        Mixture(**found["mixture"])
        return {**found, "fingerprint": str(found["fingerprint"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{folder} was not made by bench.lib.upcycle: name another folder") from error


def mixture_options(parser: argparse.ArgumentParser) -> None:
    """Options that `Mixture` is made of."""
    parser.add_argument("--experts", type=int, default=16, help="of each layer (default 16)")
    parser.add_argument("--chosen", type=int, default=4, help="experts that a row goes to (default 4)")
    parser.add_argument("--skew", type=float, default=0.0,
                        help="exponent of the Zipf law of experts' shares (default 0: alike)")  # fmt: skip
    parser.add_argument("--factor", type=int, default=1, help="by which it is widened first (default 1)")


def main(argv: list[str] | None = None) -> int:
    """Build the model and print its folder on stdout."""
    parser = argparse.ArgumentParser(prog="python -m bench.lib.upcycle", description=main.__doc__)
    parser.add_argument("model", help="a folder, a hub id, a .gguf file, or demo")
    parser.add_argument("out", nargs="?", type=Path, help="the folder to make (default: in the user's cache)")
    mixture_options(parser)
    parser.add_argument("--force", action="store_true", help="replace an upcycled model that is there")
    args = parser.parse_args(argv)

    def work() -> Path:
        mixture = Mixture(args.experts, args.chosen, args.skew, args.factor)
        return ensure(args.model, args.out, mixture, force=args.force)[0]

    return printed(work)


if __name__ == "__main__":
    sys.exit(main())
