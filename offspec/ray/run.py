"""Batch run on a Ray cluster, whose actors answer lines and return the results to one file."""

import logging
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from offspec.core.config import EngineConfig
from offspec.core.errors import ClosedError, OffspecError, RequestError, missing_package
from offspec.core.events import Event, Notice
from offspec.core.sampling_defaults import SamplingOverrides
from offspec.ray.engine_actor import EngineActor, engine_loader
from offspec.ray.predict import cluster_config
from offspec.server.batch.line_processor import parse_usage, result
from offspec.server.batch.lines import Line
from offspec.server.batch.offline_run import OfflineBatchRun
from offspec.server.batch.results import ResultFile
from offspec.server.service import Loader

_MOST_ROWS = 16  # rows per batch of an actor, which are repeated if the actor dies
_CONNECT_TIMEOUT_S = 10.0
_STORE_BYTES = 2**28  # shared memory of a new local cluster; lines and results are small


class LinePredictor(EngineActor):
    """Callable class for `map_batches` that turns JSON lines in a column `line` into results.

    Input columns: `line` and `id`. Output columns: `id`, `status`, `tokens` of the answer, and `result` as
    JSON. If the engine fails, the output is one row with status 0 and the error as `result`, because Ray
    would wrap a raised exception.
    """

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        lines = [msgspec.json.decode(text, type=Line) for text in batch["line"]]
        try:
            found = self.answer(lines)
        except OffspecError as error:
            return {"id": [""], "status": [0], "tokens": [0], "result": [msgspec.json.encode(str(error))]}
        answered = [(line, *found[line.number]) for line in lines]
        return {
            "id": [line.id for line in lines],
            "status": [status for _, status, _ in answered],
            "tokens": [parse_usage(value).answer_tokens for _, _, value in answered],
            "result": [msgspec.json.encode(result(*each)) for each in answered],
        }


class RayBatchRun(OfflineBatchRun):
    """Batch run whose lines are answered by actors of a cluster, one per machine or per GPU.

    `run` raises RequestError if there is no such cluster, or if it lacks the resources.

    Args:
        config: Configuration of each actor's engine; paths refer to the actor's machine.
        results: File that receives the results. Lines with a result in it are skipped.
        notify: Receives Notice and LoadProgress events.
        names: Accepted model names in lines.
        sampling: Sampling parameters that override the model's defaults, for lines that do not set them.
        plan: Plan file, on each machine.
        address: Address of the cluster, as for `ray.init`: "auto" for the running cluster, "local" for a new
            one.
        actors: Number of actors; None for as many as possible.
        in_flight: Number of concurrent lines. None: one more than an engine's concurrent sequences.
        load: Loader of the engines. Default: `engine_loader`.
    """

    def __init__(
        self,
        config: EngineConfig,
        results: ResultFile,
        notify: Callable[[Event], None],
        *,
        names: Sequence[str],
        sampling: SamplingOverrides | None = None,
        plan: Path | None = None,
        address: str = "auto",
        actors: int | None = None,
        in_flight: int | None = None,
        load: Loader | None = None,
    ) -> None:
        super().__init__(results, notify)
        self._address = address
        self._config, self._plan, self._load = config, plan, load
        self._actors, self._in_flight = actors, in_flight
        self._actor_settings = {"names": names, "sampling": sampling}

    def _answer(self, waiting: Sequence[Line]) -> None:
        self._keep_errors(waiting)
        with ray_connection(self._address):
            self._answer_on_cluster([line for line in waiting if line.fault is None])

    def _answer_on_cluster(self, lines: Sequence[Line]) -> None:
        import ray
        from ray.exceptions import RayError

        config, pool = cluster_config(self._config, self._actors, planned=self._plan is not None)
        load = self._load or engine_loader(config, self._plan)
        size = pool["compute"].max_size
        device = "GPUs" if "num_gpus" in pool else "CPUs"
        actors = f"{size} Ray {'actor' if size == 1 else 'actors'}"
        self._notify(Notice(f"running on {actors}, computing on {device} of the cluster"))
        rows = [{"id": line.id, "line": msgspec.json.encode(line)} for line in lines]
        # Several batches per actor, so that no actor has many lines left while others are idle.
        share = max(1, min(_MOST_ROWS, len(rows) // (4 * size)))
        dataset = ray.data.from_items(rows, override_num_blocks=-(-len(rows) // share)).map_batches(
            LinePredictor,
            fn_constructor_kwargs={**self._actor_settings, "load": load, "in_flight": self._in_flight},
            batch_size=share,
            **pool,
        )
        self._report_progress()
        try:
            for row in dataset.iter_rows():
                if not row["status"]:
                    raise OffspecError(msgspec.json.decode(row["result"]))
                if row["id"] not in self._results.done:
                    self._keep(row["id"], row["tokens"], msgspec.json.decode(row["result"]))
        except RayError as error:
            reason = str(error).strip().splitlines()[0][:300]
            raise ClosedError(f"the Ray cluster failed: {reason}; see its logs") from None
        if missing := [line.id for line in lines if line.id not in self._results.done]:
            raise ClosedError(
                f"{len(missing)} lines were not answered; run the same command again to retry them"
            )


@contextmanager
def ray_connection(address: str) -> Iterator[None]:
    """Connect to a Ray cluster while the block runs. Raises RequestError if there is none."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # otherwise Ray sends usage statistics
    try:
        import ray
    except ImportError as error:
        raise missing_package(error.name or "ray", "ray") from None
    _check_address(address)
    new: dict[str, Any] = {}
    if address == "local":
        new = {"object_store_memory": _STORE_BYTES, "include_dashboard": False}
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **new)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RequestError(
            f"no Ray cluster at {address}: {reason}; start one there with `ray start`"
        ) from None
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # only now: importing ray.data sets it
    try:
        yield
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Raise RequestError if nothing listens at the address; Ray itself would retry for minutes."""
    if found := re.fullmatch(r"(?:ray://)?(.+):(\d+)", address):
        try:
            socket.create_connection((found[1], int(found[2])), _CONNECT_TIMEOUT_S).close()
        except (OSError, OverflowError) as error:
            raise RequestError(f"no Ray cluster at {address}: {error}") from None
