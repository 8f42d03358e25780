"""Configurations and sizes of well-known models, for planning without a network."""

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from offspec.checkpoint.hub_name import hub_name

_FILE = "shapes.json"
SIZES = "known_sizes.json"  # written by docs/make_sizes.py


@dataclass(frozen=True, slots=True)
class KnownSize:
    """Sizes of a well-known model.

    Args:
        nbytes: Bytes on disk, as published on the hub.
        least_ram: Minimum bytes of RAM without a GPU and without a draft; see `Plan.least_memory`.
        least_vram: Minimum bytes of GPU memory.
        refused: Why its architecture cannot be run; "" if it can. If set, sizes are 0.
    """

    nbytes: int = 0
    least_ram: int = 0
    least_vram: int = 0
    refused: str = ""


def known_config(hub_id: str) -> dict[str, Any] | None:
    """Return the configuration of a hub model, as transformers' AutoConfig reads it; None if unknown.

    Sizes are those of the base model; fields that planning ignores are taken from its instruction-tuned
    variant. The id is case-insensitive, as on the hub. The address of the model's page is accepted too.
    """
    name = hub_name(hub_id)
    if name is not None and not name.gguf and name.revision is None:
        hub_id = name.repository
    config = _configs().get(hub_id.lower())
    return None if config is None else dict(json.loads(config))


@cache
def _configs() -> dict[str, str]:
    """Return JSON texts by lower-case hub id. They are texts so that callers cannot change them."""
    found, configs = _file(), dict[str, str]()
    for hub_id, model in found["models"].items():
        names = (hub_id, *model.pop("also"))
        text = json.dumps(found["families"][model.pop("family")] | model)
        configs.update((name.lower(), text) for name in names)
    return configs


def known_models() -> tuple[str, ...]:
    """Return the lower-case hub ids of the known models."""
    return tuple(_configs())


def model_groups() -> tuple[tuple[str, ...], ...]:
    """Return hub ids as the hub spells them, in alphabetical order, grouped by configuration."""
    models: dict[str, Any] = _file()["models"]
    groups = ((hub_id, *model["also"]) for hub_id, model in models.items())
    return tuple(sorted(groups, key=lambda names: names[0].lower()))


def known_sizes() -> dict[str, KnownSize]:
    """Return sizes of the well-known models, by hub id in alphabetical order."""
    found = json.loads(_text(SIZES))
    sizes = {name: KnownSize(**found[names[0]]) for names in model_groups() for name in names}
    return dict(sorted(sizes.items(), key=lambda item: item[0].lower()))


def _file() -> dict[str, Any]:
    return dict(json.loads(_text(_FILE)))


def _text(name: str) -> str:
    return resources.files("offspec.checkpoint").joinpath(name).read_text(encoding="utf-8")
