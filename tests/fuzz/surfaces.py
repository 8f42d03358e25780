"""The kinds of files that are mutated: how whole ones are made, and what reads them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import offspec
from offspec import SamplingParams
from offspec.chat.archive import SessionArchive
from offspec.chat.conversation import Conversation, Message
from offspec.checkpoint.checksum import FileHasher
from offspec.checkpoint.folder import CONFIG, INDEX
from offspec.checkpoint.open import check_model
from offspec.checkpoint.pack_manifest import MANIFEST
from offspec.core.events import ignore_event
from offspec.draft.heads.open import open_head
from offspec.model.tokenizer import TextCodec, load_tokenizer
from offspec.plan.hardware_profile import load_hardware
from offspec.plan.records import read_plan

_MEMORY = 2_000_000_000
_PARAMS = SamplingParams(max_tokens=2, ignore_eos=True)
_TALK = [{"role": "user", "content": "w5 w9"}, {"role": "assistant", "content": "w7"}]


@dataclass(frozen=True, slots=True)
class Surface:
    """Files of one kind.

    base: the file or folder, of those of `write_bases`, that a case gets a copy of; files: which of it are
    changed, one in each case; use: reads the copy, and may raise nothing but OffspecError; mend: makes right
    what the rest of the copy says about the changed file.
    """

    base: str
    files: tuple[str, ...]
    use: Callable[[Path], object]
    mend: Callable[[Path], object] = lambda copy: None


def write_bases(root: Path) -> None:
    """Whole files of every kind, under the names that surfaces give."""
    from transformers import AutoModelForCausalLM

    from offspec.model.quantize.pack import pack_model
    from tests.support.gguf_files import write_gguf
    from tests.support.heads_files import medusa_tensors, mlp_config, mlp_tensors, write_head
    from tests.support.sample_plans import LAPTOP, small
    from tests.support.tiny_models import write_model

    model = write_model(root / "model", num_hidden_layers=2)
    write_model(root / "experts", "qwen3_moe", num_hidden_layers=2)
    kinds = ["sliding_attention", "full_attention"]
    write_model(root / "windows", "gemma3_text", num_hidden_layers=2, layer_types=kinds)
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    whole.save_pretrained(root / "shards", max_shard_size="20KB")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (root / "shards" / file).write_bytes((model / file).read_bytes())
    write_gguf(root / "model.gguf", whole, "llama")
    wide = write_model(root / "wide", num_hidden_layers=2, hidden_size=64, intermediate_size=64)
    pack_model(str(wide), "int8", out=root / "pack", cache_dir=root / "cache")
    write_head(root / "medusa", {"medusa_num_heads": 2, "medusa_num_layers": 1}, medusa_tensors(2))
    write_head(root / "mlp", mlp_config(), mlp_tensors())
    said = [Message("user", "w5 w9"), Message("assistant", "w7", token_ids=(7,), finish="eos")]
    (root / "session.json").write_text(Conversation(model="demo", system="w3", messages=said * 2).to_text())
    (root / "plan.json").write_text(small().to_text())
    (root / "profile.json").write_text(json.dumps(LAPTOP.to_json(), indent=1))


def _answer(model: Path) -> None:
    check_model(str(model))
    with offspec.load(
        str(model), device="cpu", memory=_MEMORY, draft="none", budget=2, width=2, context=64
    ) as engine:
        engine.generate("w5 w9", _PARAMS)


def _encode(folder: Path) -> None:
    codec = TextCodec(load_tokenizer(folder), folder, {})
    ids = codec.encode_prompt("w5 w9 \u00e9\n", raw=True)
    codec.decode(ids)
    if codec.has_chat_template:
        codec.encode_prompt(_TALK[:1])
        codec.render(_TALK, continue_final_message=True)


def _draft(folder: Path) -> None:
    from tests.support.heads_files import target_shape

    head = open_head(str(folder), target_shape(), ignore_event)
    if head is not None:
        head.fingerprint  # noqa: B018 - reads the headers once more


def _talk(file: Path) -> None:
    archive = SessionArchive(file.parent)
    for entry in archive.list():
        Conversation.read(entry.file)
    talk: Any = Conversation.read(file)
    Conversation.from_json(json.loads(talk.to_text()))


def _machine(file: Path) -> None:
    load_hardware(str(file))


def _sum_again(pack: Path) -> None:
    """Write the checksums of a pack's files as they are now, so that their bytes are believed.

    A manifest that is none stays as it is, and so do its entries of files that are not there.
    """
    try:
        value = json.loads((pack / MANIFEST).read_bytes())
        for entries in (value["files"], value.get("texts", {})):
            for name, entry in entries.items():
                if name in os.listdir(pack):
                    entry.update(_sum(pack / name))
        (pack / MANIFEST).write_text(json.dumps(value))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass


def _sum(file: Path) -> dict[str, Any]:
    data = file.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little") if file.name.endswith(".safetensors") else 0
    seen = FileHasher(min(header, len(data)))
    seen.add(memoryview(data))
    return asdict(seen.result())


_PACKED = ("model-layer-0000.safetensors", "model-rest.safetensors")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
SURFACES: dict[str, Surface] = {
    "safetensors": Surface("model", ("model.safetensors",), _answer),
    "config": Surface("model", (CONFIG, CONFIG, CONFIG, "generation_config.json"), _answer),
    "config of experts": Surface("experts", (CONFIG,), _answer),
    "config of windows": Surface("windows", (CONFIG,), _answer),
    "index": Surface("shards", (INDEX,), _answer),
    "gguf": Surface("model.gguf", (), _answer),
    "tokenizer": Surface("model", _TOKENIZER, _encode),
    "template": Surface("model", ("chat_template.jinja",), _encode),
    "manifest": Surface("pack", (MANIFEST,), _answer, _sum_again),
    "pack": Surface("pack", (CONFIG, *_PACKED), _answer, _sum_again),
    "session": Surface("session.json", (), _talk),
    "plan": Surface("plan.json", (), read_plan),
    "profile": Surface("profile.json", (), _machine),
    "medusa": Surface("medusa", ("model.safetensors", CONFIG), _draft),
    "mlp": Surface("mlp", ("model.safetensors", CONFIG), _draft),
}
