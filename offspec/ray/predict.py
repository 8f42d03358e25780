"""Ray Data: a class for `map_batches`, and what it is mapped with."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from offspec.core.config import AUTO, EngineConfig, SamplingParams, Settings
from offspec.core.errors import RequestError
from offspec.core.sampling_defaults import SamplingOverrides

if TYPE_CHECKING:
    from ray.data import Dataset

    from offspec.server.batch.lines import Line
    from offspec.server.service import Loader

_ASKED = ("id", "messages", "prompt", "sampling_params")
_TOLD = {  # new columns, and their types in Arrow
    "generated_text": "string",
    "finish_reason": "string",
    "num_input_tokens": "int64",
    "num_generated_tokens": "int64",
    "error": "string",
}


class Predictor:
    """A callable class for `Dataset.map_batches`: rows with questions get answers.

    A row has `messages`, or a `prompt`, which is one message of the user; `sampling_params`, an object with
    any fields of Chat Completions; and an `id`. Objects and lists may be JSON as text. Other columns stay as
    they are. A row without a seed gets one that comes from its id and what it asks, so that another run says
    the same.

    New columns: `generated_text`, `finish_reason`, `num_input_tokens`, `num_generated_tokens`, and `error`,
    why there is no answer; what does not apply is None.

    Args:
        model: A hub id, or a path on the machine of the actor; or a whole configuration.
        sampling_params: Parameters of rows that do not set them; greedy by default, whatever the model.
        plan: The file of a plan, on that machine.
        in_flight: Rows that are asked at a time. None: one more than the engine answers side by side.
        load: Loads the engine in another way than `offspec.load`.
        settings: Fields of `EngineConfig`, as `offspec.load` takes them.

    The first call raises OffspecError where the model cannot be loaded.
    """

    def __init__(
        self,
        model: str | Path | EngineConfig,
        *,
        sampling_params: SamplingParams | None = None,
        plan: Path | None = None,
        in_flight: int | None = None,
        load: "Loader | None" = None,
        **settings: Any,
    ) -> None:
        from offspec.ray.answerer import Answerer, loader

        config = _config(model, settings)
        name = str(config.model)
        sampling = SamplingOverrides.all_of(sampling_params or SamplingParams())
        self._answerer: Answerer = Answerer(load or loader(config, plan), (name,), sampling, in_flight)

    def close(self) -> None:
        """Close the engine."""
        self._answerer.close()

    def __call__(self, batch: Any) -> Any:
        """The batch with its answers: a table of Arrow, or columns by name, each an array."""
        is_table = not isinstance(batch, Mapping)
        names = batch.column_names if is_table else list(batch)
        if not {"messages", "prompt"} & {*names}:
            raise RequestError("rows must have a column messages or a column prompt")
        asked = {name: _plain(batch[name]) for name in _ASKED if name in names}
        count = len(next(iter(asked.values())))
        lines = [_line(at, {name: values[at] for name, values in asked.items()}) for at in range(count)]
        found = self._answerer.answer(lines)
        rows = [_row(*found[at]) for at in range(count)]
        told = {name: [row[name] for row in rows] for name in _TOLD}
        return _with_columns(batch, told) if is_table else {**batch, **told}


def predict(
    dataset: "Dataset",
    model: str | Path | EngineConfig,
    *,
    actors: int | None = None,
    batch_size: int = 16,
    **more: Any,
) -> "Dataset":
    """Rows with answers: `Predictor` mapped over a dataset, as it streams.

    An actor that dies is started again, and asked again what it had not answered.

    Args:
        dataset: Its columns are those of `Predictor`.
        model: See `Predictor`.
        actors: How many, each with a whole machine or, where the device is a GPU, one GPU; None: as many as
            there is room for. With `device="auto"` they take GPUs if the cluster has any.
        batch_size: Rows that an actor is given at a time, and has to answer again where it dies.
        more: See `Predictor`.
    """
    settings = {name: value for name, value in more.items() if name in EngineConfig.__dataclass_fields__}
    config = _config(model, settings)
    given = {"model": config, **{name: value for name, value in more.items() if name not in settings}}
    config, pool = on_cluster(config, actors, planned=given.get("plan") is not None)
    given["model"] = config
    return dataset.map_batches(
        Predictor, fn_constructor_kwargs=given, batch_size=batch_size, batch_format="pyarrow", **pool
    )


def _config(model: str | Path | EngineConfig, settings: dict[str, Any]) -> EngineConfig:
    return model if isinstance(model, EngineConfig) else EngineConfig.of(model, cast(Settings, settings))


def on_cluster(
    config: EngineConfig, actors: int | None, *, planned: bool
) -> tuple[EngineConfig, dict[str, Any]]:
    """The configuration of all engines, and arguments of `map_batches` for their actors.

    "auto" becomes one GPU each if the cluster has any, else the CPU: all engines then round alike, and one
    whose GPU cannot be used says why. planned: they follow a plan, whose device "auto" leaves as it is.
    Raises RequestError.
    """
    import ray

    if config.device != AUTO:
        return config, actor_pool(config.device, actors)
    has_gpus = any(node["Resources"].get("GPU", 0) >= 1 for node in ray.nodes() if node["Alive"])
    device = "cuda" if has_gpus else "cpu"
    return config if planned else replace(config, device=device), actor_pool(device, actors)


def actor_pool(device: str, actors: int | None) -> dict[str, Any]:
    """Arguments of `map_batches` for one actor on each machine, or for each GPU. Raises RequestError.

    device: of the engines. actors: how many; None: all there is room for.
    """
    import ray
    from ray.data import ActorPoolStrategy

    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if device == "cpu":
        counts = [int(machine["CPU"]) for machine in machines if machine.get("CPU", 0) >= 1]
        room, needed = len(counts), {"num_cpus": min(counts, default=1)}
    else:
        each = 1 if device == "cuda" else device.count("cuda:") or 0
        counts = [int(machine["GPU"]) for machine in machines if machine.get("GPU", 0) >= max(each, 1)]
        each = each or min(counts, default=1)
        room, needed = sum(count // each for count in counts), {"num_gpus": each}
    if not room:
        kind = "processors" if device == "cpu" else "GPUs"
        raise RequestError(f"no machine of the Ray cluster has the {kind} that `device` {device} needs")
    size = min(actors or room, room)
    return {"compute": ActorPoolStrategy(size=size), **needed}


def _line(number: int, row: dict[str, Any]) -> "Line":
    """A row as a line of `offspec batch`."""
    from offspec.server.batch.lines import read_line

    fields = {name: value for name, value in row.items() if value is not None}
    for name in ("messages", "sampling_params"):
        if isinstance(fields.get(name), str):
            with suppress(ValueError):  # then the line has a fault
                fields[name] = json.loads(fields[name])
    fields["id"] = str(fields.get("id", ""))
    return read_line(number, json.dumps(fields).encode())


def _plain(value: Any) -> Any:
    """A value, or a column, without what its type has added: arrays, and fields that other rows have."""
    for convert in ("to_pylist", "tolist"):
        value = getattr(value, convert)() if hasattr(value, convert) else value
    if isinstance(value, Mapping):
        return {name: plain for name in value if (plain := _plain(value[name])) is not None}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _with_columns(table: Any, columns: dict[str, list[Any]]) -> Any:
    """A table of Arrow with more columns, or with others in the place of those of the same names."""
    import pyarrow

    for name, values in columns.items():
        if name in table.column_names:
            table = table.drop_columns([name])
        table = table.append_column(name, pyarrow.array(values, _TOLD[name]))
    return table


def _row(status: int, value: dict[str, Any]) -> dict[str, Any]:
    """The new columns of a row."""
    row: dict[str, Any] = dict.fromkeys(_TOLD)
    if status != 200:
        return {**row, "error": value["error"]["message"]}
    if len(value["choices"]) != 1:
        return {**row, "error": "n: a row has one answer; leave it out"}
    (choice,), usage = value["choices"], value["usage"]
    return {
        "generated_text": choice["message"]["content"],
        "finish_reason": choice["finish_reason"],
        "num_input_tokens": usage["prompt_tokens"],
        "num_generated_tokens": usage["completion_tokens"],
        "error": None,
    }
