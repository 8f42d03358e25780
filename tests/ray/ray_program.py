"""A driver on a Ray cluster of two one-processor machines, both on this computer: IN OUT ROWS, no torch.

It answers the lines of IN into OUT and has a worker killed after some answers, makes a folder ROWS of Parquet
files of the same questions, and checks which devices "auto" selects, before and after a machine has GPUs.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

from offspec.core.config import EngineConfig
from offspec.core.events import Event, LoadProgress
from offspec.ray.predict import cluster_config, predict
from offspec.ray.run import RayBatchRun, ray_connection
from offspec.server.batch.lines import read_lines
from offspec.server.batch.results import ResultFile

CONFIG = EngineConfig("tiny")


class NoTorch(MetaPathFinder):
    """Import hook that raises if the driver imports torch or transformers."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"the driver imports {name}")


class Load:
    """Loads an engine whose answers depend on the prompts; each worker reports its process."""

    def __init__(self, pids: str) -> None:
        self._pids = pids

    def __call__(self, notify: Callable[[Event], None]) -> Any:
        from tests.server.batch_program import RandomAnswers

        (Path(self._pids) / str(os.getpid())).touch()
        return RandomAnswers(delay=0.02)


def main() -> None:
    requests, out, rows = map(Path, sys.argv[1:])
    sys.meta_path.insert(0, NoTorch())
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    pids = out.with_name("pids")
    pids.mkdir()
    load, killed = Load(str(pids)), list[int]()

    def kill(event: Event) -> None:
        if not killed and isinstance(event, LoadProgress) and event.done >= 8:
            killed.append(int(next(pids.iterdir()).name))
            os.kill(killed[0], signal.SIGKILL)

    store = {"object_store_memory": 100 * 2**20}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **store}
    )
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, **store)
        with ResultFile(out) as results:
            run = RayBatchRun(CONFIG, results, kill, names=("tiny",), address=cluster.address, load=load)
            run.run(list(read_lines(requests)))
        workers = len(list(pids.iterdir()))
        _rows(cluster.address, load, requests, rows)
        devices = [_devices(cluster.address)]
        cluster.add_node(num_cpus=1, num_gpus=2, **store)
        devices.append(_devices(cluster.address))
    finally:
        cluster.shutdown()
    told = {"killed": len(killed), "workers": workers, "torch": "torch" in sys.modules, "devices": devices}
    print(json.dumps(told))


def _rows(address: str, load: Load, requests: Path, out: Path) -> None:
    import ray

    with ray_connection(address):
        rows = [json.loads(line) for line in requests.read_text().splitlines()]
        predict(ray.data.from_items(rows), CONFIG, load=load, batch_size=4).write_parquet(str(out))


def _devices(address: str) -> list[str]:
    """Device of engines, resources of each, and their number: without a plan, with one, on CPUs."""
    found = []
    with ray_connection(address):
        for device, planned in (("auto", False), ("auto", True), ("cpu", False)):
            config, pool = cluster_config(EngineConfig("tiny", device=device), None, planned=planned)
            (kind,) = (name for name in pool if name != "compute")
            found.append(f"{config.device} {kind} {pool['compute'].max_size}")
    return found


if __name__ == "__main__":
    main()
