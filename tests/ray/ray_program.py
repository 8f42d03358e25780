"""A driver on a Ray cluster of two machines of one processor each, all on this one, without torch.

COMMAND MODEL IN OUT: "run" answers all lines; "kill" has a worker killed when some are answered, and "rows"
does it by rows, with OUT a folder of Parquet files. Without a model, as "", answers are made of the prompts.
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
from offspec.ray.predict import predict
from offspec.ray.run import RayBatchRun, connected
from offspec.server.batch.lines import read_lines
from offspec.server.batch.results import ResultFile
from offspec.server.served_engine import ServedEngine


class NoTorch(MetaPathFinder):
    """The driver has none."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"the driver imports {name}")


class Load:
    """Loads the tiny model of a folder; each worker says which process it is."""

    def __init__(self, model: str, pids: str) -> None:
        self._model, self._pids = model, pids

    def __call__(self, notify: Callable[[Event], None]) -> ServedEngine:
        (Path(self._pids) / str(os.getpid())).touch()
        if not self._model:
            from tests.server.batch_program import RandomAnswers

            return RandomAnswers(delay=0.02)
        from tests.support.tiny_models import tiny_engine

        return tiny_engine(Path(self._model), budget=16)


def main() -> None:
    command, model, requests, out = sys.argv[1:]
    sys.meta_path.insert(0, NoTorch())
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    pids = Path(out).with_name("pids")
    pids.mkdir(exist_ok=True)
    load, killed = Load(model, str(pids)), list[int]()

    def kill(event: Event) -> None:
        if command == "kill" and not killed and isinstance(event, LoadProgress) and event.done >= 8:
            killed.append(int(next(pids.iterdir()).name))
            os.kill(killed[0], signal.SIGKILL)

    store = {"object_store_memory": 100 * 2**20}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **store}
    )
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, **store)
        config = EngineConfig(model=model or "tiny")
        if command == "rows":
            _rows(cluster.address, load, config, Path(requests), Path(out))
        else:
            with ResultFile(Path(out)) as results:
                run = RayBatchRun(config, results, kill, names=("tiny",), address=cluster.address, load=load)
                run.run(list(read_lines(Path(requests))))
    finally:
        cluster.shutdown()
    workers = len(list(pids.iterdir()))
    print(json.dumps({"killed": len(killed), "workers": workers, "torch": "torch" in sys.modules}))


def _rows(address: str, load: Load, config: EngineConfig, requests: Path, out: Path) -> None:
    import ray

    with connected(address):
        rows = [json.loads(line) for line in requests.read_text().splitlines()]
        predict(ray.data.from_items(rows), config, load=load, batch_size=4).write_parquet(str(out))


if __name__ == "__main__":
    main()
