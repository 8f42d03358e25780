"""`offspec pack`: quantize a model into a folder, or verify such a pack."""

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
from offspec.ui.cli.output import StdoutWriter
from offspec.ui.cli.render import Renderer
from offspec_planners.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from offspec.checkpoint.pack_manifest import Manifest
    from offspec.model.quantize.pack import PackResult

EPILOG = """[bold]Examples[/]

Quantize to a quarter of the size, in the cache that [bold]--quantize nf4[/] also uses:

  offspec pack ./Qwen3-8B --to nf4

Into a folder that can be used as MODEL:

  offspec pack ./Qwen3-8B --to int8 --out ./Qwen3-8B-int8

  offspec generate ./Qwen3-8B-int8 "Why is the sky blue?" --memory 4GB

Verify the checksums of a pack:

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
    """Quantize a model into a folder that loads like any other model.

    After an interruption, the same command resumes. An existing pack is
    verified, and damaged parts are made again.

    Args:
        model (MODEL): Model to quantize, in bf16, fp16 or fp32: a Hugging Face id, a folder, or a `.gguf`
            file. With `--verify`, the folder of a pack.

    Pack:
        to: Format of the layers' matrices: nf4 (4-bit NF4), int8, or int4-g64 (4-bit integers, groups of
            64). Embedding, norms, routers and head stay in bf16.
        out (DIR): Folder to write. Default: a folder in the cache.
        again: Also quantize a `.gguf` file that is already quantized, at a further loss of quality.
        verify: Compare an existing pack with its checksums and write nothing.
        memory: Memory limit of the whole process. Default: about 300 MB in addition to the program itself.
        as_json: Print one JSON object about the pack instead of its folder.
        quiet: Suppress progress and notices on stderr.
    """
    if verify and (to is not None or out is not None or again):
        raise RequestError("--verify only reads the pack named as MODEL; omit --to, --out and --again")
    if not verify and to is None:
        raise RequestError("no format given: add --to nf4, --to int8 or --to int4-g64")
    if verify:
        check_pack(Path(model))
    else:
        check_model(model)
    with Renderer(as_json=as_json, quiet=quiet) as renderer:
        from offspec.model.quantize import (
            pack as quantizer,
        )  # imports torch: after every check of the options

        if to is None:
            manifest = quantizer.verify_pack(Path(model), renderer.show)
            renderer.note(f"{len(manifest.checksums)} files match their checksums")
            found = _of_manifest(Path(model), manifest)
        else:
            made = quantizer.pack_model(model, to, out=out, memory=memory, twice=again, notify=renderer.show)
            renderer.note(_summary(made))
            found = _of_pack(made)
    StdoutWriter().write((json.dumps(found, ensure_ascii=False) if as_json else found["folder"]) + "\n")


def _summary(pack: "PackResult") -> str:
    if pack.kept == pack.files:
        return f"{pack.folder.name} already exists: {pack.files} files, {format_bytes(pack.nbytes)}"
    sizes = f"{format_bytes(pack.source_bytes)} became {format_bytes(pack.nbytes)}"
    return f"{sizes} in {pack.files} files, in {format_seconds(pack.seconds, 1)}"


def _of_pack(pack: "PackResult") -> dict[str, Any]:
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
        "bytes": sum(file.checksum.size for file in manifest.files.values()),
    }
