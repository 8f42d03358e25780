"""Configurations and sizes of well-known models, for plans without a network."""

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
        nbytes: Bytes on disk, as the hub has it.
        least_ram: Bytes of RAM that it needs without a GPU and without a draft; see `Plan.least_memory`.
        least_vram: Bytes of a GPU's memory that it needs.
        refused: Why its architecture cannot be run; "" if it can. Sizes are 0 then.
    """

    nbytes: int = 0
    least_ram: int = 0
    least_vram: int = 0
    refused: str = ""


def known_config(hub_id: str) -> dict[str, Any] | None:
    """The configuration of a hub model, as transformers' AutoConfig reads it; None for one not known here.

    Sizes are the model's own; fields that planning ignores are those of its instruction-tuned variant.
    The case of the id does not matter, as on the hub. The address of the model's page works as well.
    """
    name = hub_name(hub_id)
    if name is not None and not name.gguf and name.revision is None:
        hub_id = name.repository
    config = _configs().get(hub_id.lower())
    return None if config is None else dict(json.loads(config))


@cache
def _configs() -> dict[str, str]:
    """JSON texts by hub id in small letters. Texts, so that callers cannot change them."""
    found, configs = _file(), dict[str, str]()
    for hub_id, model in found["models"].items():
        names = (hub_id, *model.pop("also"))
        text = json.dumps(found["families"][model.pop("family")] | model)
        configs.update((name.lower(), text) for name in names)
    return configs


def known_models() -> tuple[str, ...]:
    """Hub ids, in small letters, of the models that are known here."""
    return tuple(_configs())


def model_groups() -> tuple[tuple[str, ...], ...]:
    """Hub ids as the hub spells them, in alphabetical order; models of one configuration together."""
    models: dict[str, Any] = _file()["models"]
    groups = ((hub_id, *model["also"]) for hub_id, model in models.items())
    return tuple(sorted(groups, key=lambda names: names[0].lower()))


def known_sizes() -> dict[str, KnownSize]:
    """Sizes of the well-known models, by hub id in alphabetical order."""
    found = json.loads(_text(SIZES))
    sizes = {name: KnownSize(**found[names[0]]) for names in model_groups() for name in names}
    return dict(sorted(sizes.items(), key=lambda item: item[0].lower()))


def _file() -> dict[str, Any]:
    return dict(json.loads(_text(_FILE)))


def _text(name: str) -> str:
    return resources.files("offspec.checkpoint").joinpath(name).read_text(encoding="utf-8")
