"""`offspec pack`: round a model to fewer bits, once, or verify such a pack."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offspec.checkpoint.open import check_model
from offspec.checkpoint.pack_manifest import check_pack
from offspec.core.config import PackFormat
from offspec.core.errors import RequestError
from offspec.ui.cli import completion
from offspec.ui.cli import options as opt
from offspec.ui.cli.output import Output
from offspec.ui.cli.render import Renderer
from offspec_planners.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from offspec.checkpoint.pack_manifest import Manifest
    from offspec.model.quantize.pack import Pack

EPILOG = """[bold]Examples[/]

A model in a quarter of its bytes, in the cache, which [bold]--quantize nf4[/] uses too:

  offspec pack ./Qwen3-8B --to nf4

In a folder of its own, which can be used as MODEL:

  offspec pack ./Qwen3-8B --to int8 --out ./Qwen3-8B-int8

  offspec generate ./Qwen3-8B-int8 "Why is the sky blue?" --memory 4GB

Compare every byte of it with its checksum:

  offspec pack --verify ./Qwen3-8B-int8
"""


@opt.takes_options
def pack(
    model: Annotated[str, typer.Argument(autocompletion=completion.models)],
    to: PackFormat | None = None,
    out: Path | None = None,
    again: bool = False,
    verify: Annotated[bool, typer.Option()] = False,
    memory: int | None = None,
    as_json: bool = False,
    quiet: bool = False,
) -> None:
    """Round a model's matrices to fewer bits, once, in a folder that runs like any other model.

    After an interruption the same command resumes. A pack that is there
    already is verified, and damaged parts are made again.

    Args:
        model (MODEL): The model to pack, in bf16, fp16 or fp32: a hub id, a local folder, or a `.gguf` file.
            With `--verify` the folder of a pack.

    Pack:
        to: Format of the layers' matrices: nf4 (4 bits, NF4 levels), int8, or int4-g64 (4 bits, even steps,
            groups of 64). Embedding, norms, routers and head stay in bf16.
        out (DIR): The folder to make. Without it: one in the cache.
        again: Also round a `.gguf` file that is quantised already, which loses more.
        verify: Read a pack and compare it with its checksums; make nothing.
        memory: Memory limit of the whole process. Without it: some 300 MB in addition to the program itself.
        as_json: Print one JSON object about the pack instead of its folder.
        quiet: No progress or notices on stderr.
    """
    if verify and (to is not None or out is not None or again):
        raise RequestError("--verify reads the pack that is named first; leave out --to, --out and --again")
    if not verify and to is None:
        raise RequestError("say what to pack to: --to nf4, --to int8 or --to int4-g64")
    if verify:
        check_pack(Path(model))
    else:
        check_model(model)
    with Renderer(as_json=as_json, quiet=quiet) as renderer:
        from offspec.model.quantize import pack as packs  # imports torch: after every check of the options

        if to is None:
            manifest = packs.verify_pack(Path(model), renderer.show)
            renderer.note(f"{len(manifest.sums)} files match their checksums")
            found = _of_manifest(Path(model), manifest)
        else:
            made = packs.pack_model(model, to, out=out, memory=memory, twice=again, notify=renderer.show)
            renderer.note(_summary(made))
            found = _of_pack(made)
    Output().write((json.dumps(found, ensure_ascii=False) if as_json else found["folder"]) + "\n")


def _summary(pack: "Pack") -> str:
    if pack.kept == pack.files:
        return f"{pack.folder.name} was there already: {pack.files} files, {format_bytes(pack.nbytes)}"
    sizes = f"{format_bytes(pack.source_bytes)} became {format_bytes(pack.nbytes)}"
    return f"{sizes} in {pack.files} files, in {format_seconds(pack.seconds, 1)}"


def _of_pack(pack: "Pack") -> dict[str, Any]:
    return {
        "folder": str(pack.folder),
        "model": pack.origin.model,
        "format": pack.origin.format,
        "files": pack.files,
        "kept": pack.kept,
        "bytes": pack.nbytes,
        "source_bytes": pack.source_bytes,
        "seconds": pack.seconds,
    }


def _of_manifest(folder: Path, manifest: "Manifest") -> dict[str, Any]:
    return {
        "folder": str(folder),
        "model": manifest.origin.model,
        "format": manifest.origin.format,
        "files": len(manifest.files),
        "bytes": sum(file.sum.size for file in manifest.files.values()),
    }
