"""An application that uses transformers and offspec, and prints as JSON what offspec changed.

python -m tests.support.application FOLDER...

Each folder holds a model that offspec runs. The object lists, for each folder, the names whose values differ
from those before offspec was imported: once while the engine is open, and once after it closed.
"""

import importlib
import json
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import transformers
from torch.nn.modules import module as torch_module
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

PACKAGES = ("torch", "transformers", "jinja2")
FAMILIES = (
    "clip",
    "llama",
    "llava",
    "qwen3_next",
)  # families that offspec will run; importing them changes nothing
MESSAGES = [{"role": "user", "content": "w5 w6"}]

Found = dict[tuple[object, ...], object]


def _names() -> Iterator[tuple[tuple[object, ...], object]]:
    """Names in the modules of the packages, and in their classes."""
    for module, found in list(sys.modules.items()):
        if module.partition(".")[0] not in PACKAGES:
            continue
        for name, value in list(vars(found).items()):
            yield (module, name), value
            if isinstance(value, type) and value.__module__ == module:
                yield from (((module, name, inner), kept) for inner, kept in list(vars(value).items()))


def _entries() -> Iterator[tuple[tuple[object, ...], object]]:
    """Entries of registries, without those that start with offspec's own name."""
    registries: dict[str, Any] = {
        "sys.meta_path": sys.meta_path,
        "warnings.filters": warnings.filters,
        "attention": transformers.AttentionInterface._global_mapping,
        "experts": ALL_EXPERTS_FUNCTIONS._global_mapping,
        "configurations": transformers.CONFIG_MAPPING._extra_content,
        "hooks": torch_module._global_parameter_registration_hooks,
    }
    for registry, kept in registries.items():
        entries: Iterable[Any] = kept.items() if isinstance(kept, Mapping) else enumerate(kept)
        others = [(key, value) for key, value in entries if not str(key).startswith("offspec_")]
        yield (registry, "number"), len(others)
        yield from (((registry, key), value) for key, value in others)


def _settings() -> Iterator[tuple[tuple[object, ...], object]]:
    yield ("sys.gettrace",), sys.gettrace()
    yield ("torch", "function modes"), torch._C._len_torch_function_stack()
    yield ("torch", "threads"), torch.get_num_threads()
    yield ("torch", "gradients"), torch.is_grad_enabled()
    yield ("torch", "random numbers"), tuple(torch.get_rng_state().tolist())
    yield ("transformers", "verbosity"), transformers.logging.get_verbosity()
    yield from ((("environment", name), value) for name, value in os.environ.items())


# Counters and caches, which change with any use.
_COUNTED = (
    ("torch.utils.hooks", "RemovableHandle", "next_id"),
    ("transformers.conversion_mapping", "_checkpoint_conversion_mapping_cache"),
)


def _now() -> Found:
    found = {**dict(_names()), **dict(_entries()), **dict(_settings())}
    return {key: value for key, value in found.items() if key not in _COUNTED}


def _changed(before: Found) -> list[str]:
    now = _now()
    plain = (int, str, tuple)
    return [
        ".".join(map(str, key))
        for key, kept in before.items()
        if not (now.get(key) == kept if isinstance(kept, plain) else now.get(key) is kept)
    ]


def main(folders: list[str]) -> None:
    for family in FAMILIES:
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders[0])
    written = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    before, found = _now(), dict[str, list[str]]()

    import offspec

    params = offspec.SamplingParams(max_tokens=6, ignore_eos=True)
    for folder in folders:
        with offspec.load(folder, draft="self", memory="2GB", device="cpu", context=128) as engine:
            engine.generate(MESSAGES, params)
            found[f"{folder} open"] = _changed(before)
        found[f"{folder} closed"] = _changed(before)
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == written
    print(json.dumps(found))


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main(sys.argv[1:])
