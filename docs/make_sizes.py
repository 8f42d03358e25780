"""Write the sizes of well-known models, for `offspec plan list`, from configurations and the cost model.

python docs/make_sizes.py    takes some minutes; needs neither the models nor the machines
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from offspec.checkpoint.known_models import SIZES, known_config, model_groups
from offspec.core.config import EngineConfig
from offspec.core.errors import UnsupportedModelError
from offspec_planners.hardware_rates import Hardware, preset

FILE = Path(__file__).parents[1] / "offspec" / "checkpoint" / SIZES
_AMPLE = 10**14  # bytes, more than any model takes


def sizes(model: str) -> dict[str, Any]:
    """Bytes on disk, the least RAM without a GPU and the least memory of a GPU; or why it is refused."""
    import torch

    from offspec.plan.model_sizes import open_on_meta
    from offspec.plan.other_hardware import plan_for_hardware

    try:
        opened, _ = open_on_meta(model, torch.bfloat16, torch.device("cpu"))
    except UnsupportedModelError as error:
        return {"refused": str(error)}
    config = EngineConfig(model, draft="none", memory=_AMPLE, vram=_AMPLE)
    alone = plan_for_hardware(replace(config, vram=None), _ample("desktop-32gb"))
    beside = plan_for_hardware(config, _ample("rtx-4090"))
    return {
        "nbytes": sum(opened.layer_bytes) + opened.non_layer_bytes + opened.embedding_bytes,
        "least_ram": alone.least_memory,
        "least_vram": beside.least_vram,
    }


def _ample(name: str) -> Hardware:
    """A preset with memory for any model."""
    machine = preset(name)
    return replace(machine, ram=_AMPLE, processor=replace(machine.processor, memory=_AMPLE))


def main() -> None:
    found = {}
    for model, *_ in model_groups():
        assert known_config(model) is not None
        found[model] = sizes(model)
        print(model, found[model], flush=True)
    lines = (f" {json.dumps(model)}: {json.dumps(each)}" for model, each in found.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


if __name__ == "__main__":
    main()
