"""What `config.json` says of well-known models, so that they can be planned for without a network."""

import json
from functools import cache
from importlib import resources
from typing import Any

_FILE = "shapes.json"


def known_config(hub_id: str) -> dict[str, Any] | None:
    """The configuration of a hub model, as transformers' AutoConfig reads it; None for one not known here.

    Sizes are the model's own; what plays no part in planning is that of its instruction-tuned variant.
    Capital letters in the id do not matter, as they do not on the hub.
    """
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


def named_models() -> tuple[str, ...]:
    """The same as the hub spells them, in alphabetical order."""
    models: dict[str, Any] = _file()["models"]
    names = [name for hub_id, model in models.items() for name in (hub_id, *model["also"])]
    return tuple(sorted(names, key=str.lower))


def _file() -> dict[str, Any]:
    file = resources.files("offspec.checkpoint").joinpath(_FILE)
    return dict(json.loads(file.read_text(encoding="utf-8")))
