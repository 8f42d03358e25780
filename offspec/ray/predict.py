"""Callable class for Ray Data's `map_batches`, and its actor pool."""

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

_INPUT_COLUMNS = ("id", "messages", "prompt", "sampling_params")
_NEW_COLUMNS = {  # with their Arrow types
    "generated_text": "string",
    "finish_reason": "string",
    "num_input_tokens": "int64",
    "num_generated_tokens": "int64",
    "error": "string",
}


class Predictor:
    """Callable class for `Dataset.map_batches` that adds answers to rows.

    A row has `messages` or a `prompt` (one user message), `sampling_params` (an object with any fields of
    Chat Completions), and an `id`. Objects and lists may be JSON strings. Other columns are kept. A row
    without a seed gets one that is derived from its id and its messages, so that another run gives the same
    answer.

    New columns: `generated_text`, `finish_reason`, `num_input_tokens`, `num_generated_tokens`, and `error`,
    the reason if there is no answer. Values that do not apply are None.

    The first call raises OffspecError if the model cannot be loaded.

    Args:
        model: Hugging Face model id, or a path on the actor's machine; or a complete configuration.
        sampling_params: Parameters of rows that do not set them; greedy by default, for every model.
        plan: Plan file on the actor's machine.
        in_flight: Number of concurrent rows. None: one more than the engine's concurrent sequences.
        load: Loader of the engine. Default: `offspec.load`.
        settings: Fields of `EngineConfig`, as for `offspec.load`.
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
        from offspec.ray.engine_actor import EngineActor, engine_loader

        config = _config(model, settings)
        name = str(config.model)
        sampling = SamplingOverrides.all_of(sampling_params or SamplingParams())
        self._actor: EngineActor = EngineActor(
            load or engine_loader(config, plan), (name,), sampling, in_flight
        )

    def close(self) -> None:
        """Close the engine."""
        self._actor.close()

    def __call__(self, batch: Any) -> Any:
        """Return the batch with its answers: an Arrow table, or arrays by column name."""
        is_table = not isinstance(batch, Mapping)
        names = batch.column_names if is_table else list(batch)
        if not {"messages", "prompt"} & {*names}:
            raise RequestError("rows need a column `messages` or a column `prompt`")
        inputs = {name: _plain(batch[name]) for name in _INPUT_COLUMNS if name in names}
        count = len(next(iter(inputs.values())))
        lines = [_line(at, {name: values[at] for name, values in inputs.items()}) for at in range(count)]
        answers = self._actor.answer(lines)
        rows = [_row(*answers[at]) for at in range(count)]
        added = {name: [row[name] for row in rows] for name in _NEW_COLUMNS}
        return _with_columns(batch, added) if is_table else {**batch, **added}


def predict(
    dataset: "Dataset",
    model: str | Path | EngineConfig,
    *,
    actors: int | None = None,
    batch_size: int = 16,
    **more: Any,
) -> "Dataset":
    """Map `Predictor` over a dataset in streaming mode, and return the dataset with answers.

    An actor that dies is restarted and repeats its unanswered rows.

    Args:
        dataset: Dataset with the columns of `Predictor`.
        model: See `Predictor`.
        actors: Number of actors, each with a whole machine or, if the device is a GPU, one GPU. None: as many
            as the cluster has resources for. With `device="auto"` they use GPUs if the cluster has any.
        batch_size: Rows per batch of an actor, which are repeated if the actor dies.
        more: See `Predictor`.
    """
    settings = {name: value for name, value in more.items() if name in EngineConfig.__dataclass_fields__}
    config = _config(model, settings)
    arguments = {"model": config, **{name: value for name, value in more.items() if name not in settings}}
    config, pool = cluster_config(config, actors, planned=arguments.get("plan") is not None)
    arguments["model"] = config
    return dataset.map_batches(
        Predictor, fn_constructor_kwargs=arguments, batch_size=batch_size, batch_format="pyarrow", **pool
    )


def _config(model: str | Path | EngineConfig, settings: dict[str, Any]) -> EngineConfig:
    return model if isinstance(model, EngineConfig) else EngineConfig.of(model, cast(Settings, settings))


def cluster_config(
    config: EngineConfig, actors: int | None, *, planned: bool
) -> tuple[EngineConfig, dict[str, Any]]:
    """Return the configuration of all engines, and arguments of `map_batches` for their actors.

    Device "auto" becomes one GPU per actor if the cluster has any, else the CPU. All engines then round
    alike, and an engine with an unusable GPU reports the reason. Raises RequestError if the cluster lacks the
    resources.

    Args:
        config: Configuration with any device.
        actors: Number of actors; None for as many as possible.
        planned: Whether the engines follow a plan, whose device is used with "auto".
    """
    import ray

    if config.device != AUTO:
        return config, actor_pool(config.device, actors)
    has_gpus = any(node["Resources"].get("GPU", 0) >= 1 for node in ray.nodes() if node["Alive"])
    device = "cuda" if has_gpus else "cpu"
    return config if planned else replace(config, device=device), actor_pool(device, actors)


def actor_pool(device: str, actors: int | None) -> dict[str, Any]:
    """Return arguments of `map_batches` for one actor per machine, or per GPU.

    Raises RequestError if no machine of the cluster has the resources.

    Args:
        device: Device of the engines.
        actors: Number of actors; None for as many as possible.
    """
    import ray
    from ray.data import ActorPoolStrategy

    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if device == "cpu":
        counts = [int(machine["CPU"]) for machine in machines if machine.get("CPU", 0) >= 1]
        limit, needed = len(counts), {"num_cpus": min(counts, default=1)}
    else:
        each = 1 if device == "cuda" else device.count("cuda:") or 0
        counts = [int(machine["GPU"]) for machine in machines if machine.get("GPU", 0) >= max(each, 1)]
        each = each or min(counts, default=1)
        limit, needed = sum(count // each for count in counts), {"num_gpus": each}
    if not limit:
        kind = "processors" if device == "cpu" else "GPUs"
        raise RequestError(f"no machine of the Ray cluster has the {kind} that `device` {device} needs")
    size = min(actors or limit, limit)
    return {"compute": ActorPoolStrategy(size=size), **needed}


def _line(number: int, row: dict[str, Any]) -> "Line":
    """Convert a row to a line of `offspec batch`."""
    from offspec.server.batch.lines import read_line

    fields = {name: value for name, value in row.items() if value is not None}
    for name in ("messages", "sampling_params"):
        if isinstance(fields.get(name), str):
            with suppress(ValueError):  # reading the line then reports the error
                fields[name] = json.loads(fields[name])
    fields["id"] = str(fields.get("id", ""))
    return read_line(number, json.dumps(fields).encode())


def _plain(value: Any) -> Any:
    """Convert a value or a column to plain Python, dropping null fields, which only other rows have."""
    for convert in ("to_pylist", "tolist"):
        value = getattr(value, convert)() if hasattr(value, convert) else value
    if isinstance(value, Mapping):
        return {name: plain for name in value if (plain := _plain(value[name])) is not None}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _with_columns(table: Any, columns: dict[str, list[Any]]) -> Any:
    """Return an Arrow table with columns added, or replaced if it has columns of the same names."""
    import pyarrow

    for name, values in columns.items():
        if name in table.column_names:
            table = table.drop_columns([name])
        table = table.append_column(name, pyarrow.array(values, _NEW_COLUMNS[name]))
    return table


def _row(status: int, value: dict[str, Any]) -> dict[str, Any]:
    """Return the new columns of a row."""
    row: dict[str, Any] = dict.fromkeys(_NEW_COLUMNS)
    if status != 200:
        return {**row, "error": value["error"]["message"]}
    if len(value["choices"]) != 1:
        return {**row, "error": "n: must be 1, because a row has one answer; omit it"}
    (choice,), usage = value["choices"], value["usage"]
    return {
        "generated_text": choice["message"]["content"],
        "finish_reason": choice["finish_reason"],
        "num_input_tokens": usage["prompt_tokens"],
        "num_generated_tokens": usage["completion_tokens"],
        "error": None,
    }
