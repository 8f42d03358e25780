"""Loads models and answers on a simulated device that computes nothing, and prints each case's peak memory.

python -m tests.support.device_memory FOLDER TARGET:DRAFT:GB ...: models are names in `sparse_models.SIZES`;
the draft may be none. Each case is a line of JSON, in bytes.
"""

import gc
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TRITON_INTERPRET"] = "1"
os.environ["OFFSPEC_KERNELS"] = "triton"  # a trial would find that nothing is computed

GB, MOST = 10**9, 24


def main(folder: Path, cases: list[str]) -> None:
    import torch

    from tests.support.simulated_cuda.install import install_machine
    from tests.support.simulated_cuda.kernels import install_kernels

    os.environ["OFFSPEC_CACHE"] = tempfile.mkdtemp(dir=folder)
    machine = install_machine("sizes", total=(MOST + 1) * GB, devices=1)
    install_kernels()
    _read_nothing()
    _return_constants()
    allocator = machine.devices[0].allocator
    from offspec import CapacityError

    def set_up(settings: str) -> None:
        allocator.expandable = "expandable_segments:True" in settings

    torch._C._accelerator_setAllocatorSettings = set_up  # type: ignore[assignment]
    for case in cases:
        target, draft, gigabytes = case.split(":")
        try:
            found = _figures(folder, target, draft, int(gigabytes) * GB, allocator)
        except CapacityError as error:
            assert "out of memory" not in str(error), error
            found = {"least": error.needed}
        print(json.dumps({"case": case, **found, "promised": allocator.limit}), flush=True)


def _figures(folder: Path, target: str, draft: str, vram: int, allocator: Any) -> dict[str, Any]:
    import offspec
    from offspec import SamplingParams
    from tests.support.sparse_models import write_sparse

    gc.collect()
    settings: dict[str, Any] = {"draft_bits": 4} if draft == "8b" else {}
    with offspec.load(
        str(write_sparse(folder, target)),
        draft="none" if draft == "none" else str(write_sparse(folder, draft)),
        device="cuda",
        vram=vram,
        memory="80GB",
        budget=256,
        width=32,
        context=4096,
        **settings,
    ) as engine:
        told = engine.placement
        found: dict[str, Any] = {name: told[name] for name in ("resident_layers", "slots", "head", "chunk")}
        found["loaded"] = allocator.peak.asked
        random.seed(1)
        for tokens in (30, 3900):
            prompt = [random.randrange(3, 128_000) for _ in range(tokens)]
            engine.generate(prompt, SamplingParams(max_tokens=2, ignore_eos=True))
            found[f"prompt {tokens}"] = allocator.peak.asked
    return found | {"asked": allocator.peak.asked, "reserved": allocator.peak.reserved}


def _read_nothing() -> None:
    """Leave weights unread: their values do not matter."""
    from offspec.model import feeder
    from offspec.stream.direct_reader import DirectReader, ReadShape

    def skip(self: object, path: object, offset: int, target: object, needed: int) -> int:
        return needed

    DirectReader.read_into = skip  # type: ignore[method-assign]
    feeder.choose_read_shape = lambda units, reader: ReadShape()  # type: ignore[attr-defined]


def _return_constants() -> None:
    """Return 1 for a number that the host reads, and zeros for a tensor: the device computed nothing."""
    import torch

    from tests.support.simulated_cuda import operations, transfers

    def number(tensor: Any) -> Any:
        return torch.ones((), dtype=tensor.host.dtype, device="cpu").item()

    def fetch(into: Any, source: Any, non_blocking: bool, pinned: bool = False) -> None:
        into.zero_()

    transfers._down = lambda *args: None  # else gigabytes would be copied
    operations._SPECIAL[torch.ops.aten._local_scalar_dense.default] = number
    transfers._up = fetch


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
