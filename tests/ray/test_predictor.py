"""Rows processed by an actor: the actor needs no Ray, and the driver needs no torch."""

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from offspec.core.errors import CapacityError, OffspecError, RequestError
from offspec.ray import Predictor
from offspec.ray.run import LinePredictor, ray_connection
from offspec.server.batch.lines import CHAT, Line, read_lines
from tests.support.fake_engine import ScriptedEngine
from tests.support.waiting import PATIENCE

ASKED = [{"role": "user", "content": "Why?"}]


def column(*values: Any) -> Any:
    """An array of objects, as Ray Data makes it."""
    made = np.empty(len(values), object)
    made[:] = values
    return made


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(["Because it is so."])


@pytest.fixture(scope="module")
def predictor(engine: ScriptedEngine) -> Iterator[Predictor]:
    predictor = Predictor("tiny", load=engine.opened)
    yield predictor
    predictor.close()


def test_rows(predictor: Predictor, engine: ScriptedEngine, tmp_path: Path) -> None:
    """Same parameters and seeds as for the same lines in a file; None means omitted."""
    engine.requests.clear()
    batch = {
        "id": column("a", "b"),
        "messages": column(np.array(ASKED, object), [{**ASKED[0], "tool_calls": None}]),
        "sampling_params": column({"temperature": 0.5, "max_tokens": None}, json.dumps({"max_tokens": 2})),
        "topic": np.array([1, 2]),
    }
    told = predictor(batch)
    assert told["generated_text"] == ["Because it is so.", "Because it"]
    assert told["finish_reason"] == ["stop", "length"] and told["error"] == [None, None]
    assert told["num_generated_tokens"] == [4, 2] and told["topic"] is batch["topic"]
    lines = [
        {"id": "a", "messages": ASKED, "sampling_params": {"temperature": 0.5}},
        {"id": "b", "messages": ASKED, "sampling_params": {"max_tokens": 2}},
    ]
    path = tmp_path / "in"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    seeds = [line.request("tiny")["seed"] for line in read_lines(path)]
    assert [asked.params.seed for asked in engine.requests] == seeds
    assert [asked.params.temperature for asked in engine.requests] == [0.5, 0.0]


def test_invalid_rows(predictor: Predictor) -> None:
    """Each has its own error, and the others are answered; ids may occur twice."""
    params = column({"top_p": 7}, {"n": 2}, "nonsense", {"best_of": 3}, None)
    told = predictor({"prompt": np.array(["Why?"] * 5), "sampling_params": params})
    words = ("top_p", "one answer", "sampling_params", "best_of")
    assert all(word in error for word, error in zip(words, told["error"], strict=False))
    assert told["generated_text"] == [None] * 4 + ["Because it is so."]
    assert not predictor({"prompt": np.array([])})["generated_text"]
    with pytest.raises(RequestError, match="a column `messages` or a column `prompt`"):
        predictor({"text": np.array(["Why?"])})


def test_table_columns(predictor: Predictor) -> None:
    """Other columns keep their types, and the new ones have theirs even if all values are None."""
    pyarrow = pytest.importorskip("pyarrow")
    rows = [{"messages": ASKED, "topic": [1]}, {"messages": [{**ASKED[0], "name": "Al"}], "error": "old"}]
    table = pyarrow.Table.from_pylist(rows, schema=pyarrow.Table.from_pylist(rows[::-1] + rows).schema)
    told = predictor(table)
    assert told.schema.field("messages") == table.schema.field("messages")
    assert told.schema.field("error").type == pyarrow.string()
    assert told["generated_text"].to_pylist() == ["Because it is so."] * 2
    assert told["error"].to_pylist() == [None, None]


def test_model_fails_to_load() -> None:
    """The error passes from the actor to the driver, so it must survive pickling."""

    def load(notify: Any) -> Any:
        raise CapacityError("it does not fit", needed=2, given=1)

    predictor = Predictor("tiny", load=load)
    with pytest.raises(OffspecError, match="it does not fit") as raised:
        predictor({"prompt": np.array(["Why?"])})
    assert str(pickle.loads(pickle.dumps(raised.value))) == "it does not fit"
    predictor.close()


def test_driver_imports_no_torch() -> None:
    """Nor transformers, nor starlette's application; `ray` itself can be imported next to `offspec.ray`."""
    program = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; "
        "import offspec.ray.run; from offspec.server.batch import lines; assert 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE)


def test_lines_of_an_engine_that_fails_to_load() -> None:
    """The driver gets the error in a row: exceptions of an actor arrive wrapped, without their cause."""

    def load(notify: Any) -> Any:
        raise CapacityError("it does not fit", needed=2, given=1)

    line = Line(1, "a", CHAT, {"messages": ASKED}, True)
    told = LinePredictor(load, ("tiny",))({"line": np.array([msgspec.json.encode(line)], object)})
    assert (told["status"], told["result"]) == ([0], [b'"it does not fit"'])


def test_address_without_a_cluster() -> None:
    pytest.importorskip("ray")
    with pytest.raises(RequestError, match="no Ray cluster at 127"), ray_connection("127.0.0.1:1"):
        pass


def test_ray_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RequestError, match="\\[ray\\]"), ray_connection("local"):
        pass
