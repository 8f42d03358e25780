"""A batch on a Ray cluster: lines go to actors, and results come back to the one file."""

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
from offspec.ray.answerer import Answerer, loader
from offspec.ray.predict import on_cluster
from offspec.server.batch.answering import result, usage_of
from offspec.server.batch.lines import Line
from offspec.server.batch.results import ResultFile
from offspec.server.batch.run import LineRun
from offspec.server.service import Loader

_MOST_ROWS = 16  # that an actor is given at a time, and has to answer again where it dies
_PATIENCE_S = 10.0  # until a cluster must answer
_STORE_BYTES = 2**28  # of shared memory that a cluster of our own takes: questions and answers are small


class LinePredictor(Answerer):
    """A callable class for `map_batches`: lines as JSON in a column `line` become results.

    Columns: `line` and `id`, then `id`, `status`, `tokens` of the answer, and `result` as JSON. Where the
    engine fails there is one row with a status of 0, whose `result` is the error: Ray would wrap one that is
    raised.
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
            "tokens": [usage_of(value).answer_tokens for _, _, value in answered],
            "result": [msgspec.json.encode(result(*each)) for each in answered],
        }


class RayBatchRun(LineRun):
    """Lines on their way through the actors of a cluster, one on each machine or for each GPU.

    Args:
        config: What each actor loads; its paths are those of the actor's machine.
        results: Takes what is finished. Lines that are in it are not asked again.
        notify: Takes Notice and LoadProgress events.
        names: What lines may call the model.
        sampling: Parameters of lines that do not set them, over the model's defaults.
        plan: The file of a plan, on each machine.
        address: Of the cluster, as `ray.init` takes it: "auto", the one that runs here; "local", a new one.
        actors: How many; None: as many as there is room for.
        in_flight: Lines that are asked at a time. None: one more than an engine answers side by side.
        load: Loads the engines in another way.

    `run` raises RequestError where there is no such cluster, or no room in it.
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
        self._given = {"names": names, "sampling": sampling}

    def _answer(self, waiting: Sequence[Line]) -> None:
        self._keep_faults(waiting)
        with connected(self._address):
            self._answer_on_cluster([line for line in waiting if line.fault is None])

    def _answer_on_cluster(self, lines: Sequence[Line]) -> None:
        import ray
        from ray.exceptions import RayError

        config, pool = on_cluster(self._config, self._actors, planned=self._plan is not None)
        load = self._load or loader(config, self._plan)
        size = pool["compute"].max_size
        what = "GPUs" if "num_gpus" in pool else "CPUs"
        told = f"{size} {'actor answers' if size == 1 else 'actors answer'} on Ray"
        self._notify(Notice(f"{told}; computes on {what} of the cluster"))
        rows = [{"id": line.id, "line": msgspec.json.encode(line)} for line in lines]
        # Several turns for each actor, so that none is left with many lines while others have none.
        share = max(1, min(_MOST_ROWS, len(rows) // (4 * size)))
        dataset = ray.data.from_items(rows, override_num_blocks=-(-len(rows) // share)).map_batches(
            LinePredictor,
            fn_constructor_kwargs={**self._given, "load": load, "in_flight": self._in_flight},
            batch_size=share,
            **pool,
        )
        self._tell()
        try:
            for row in dataset.iter_rows():
                if not row["status"]:
                    raise OffspecError(msgspec.json.decode(row["result"]))
                if row["id"] not in self._results.done:
                    self._keep(row["id"], row["tokens"], msgspec.json.decode(row["result"]))
        except RayError as error:
            reason = str(error).strip().splitlines()[0][:300]
            raise ClosedError(f"the Ray cluster has failed, and its logs say more: {reason}") from None
        if missing := [line.id for line in lines if line.id not in self._results.done]:
            raise ClosedError(f"{len(missing)} lines have got no answer: the same command asks them again")


@contextmanager
def connected(address: str) -> Iterator[None]:
    """A connection to a Ray cluster, while the block runs. Raises RequestError where there is none."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would send statistics to its makers
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
            f"there is no Ray cluster at {address}: {reason}; start one there with `ray start`"
        ) from None
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # only now: importing ray.data sets it
    try:
        yield
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Raises RequestError where nothing listens: Ray tries for minutes."""
    if found := re.fullmatch(r"(?:ray://)?(.+):(\d+)", address):
        try:
            socket.create_connection((found[1], int(found[2])), _PATIENCE_S).close()
        except (OSError, OverflowError) as error:
            raise RequestError(f"there is no Ray cluster at {address}: {error}") from None
