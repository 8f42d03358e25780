"""Operations that a CUDA device may refuse: a notice reports the fallback, and answers are equal."""

from pathlib import Path
from typing import Any

import pytest
import torch

import offspec
from offspec import Notice
from offspec.model.devices import RUNTIME, SLACK
from offspec.stream.arena import Arena
from offspec_kernels import backend, triton_check
from tests.support.answers import PROMPT, sampling
from tests.support.exhaustive import sampled_params
from tests.support.tiny_models import reference, write_model

pytestmark = pytest.mark.gpu
PARAMS = sampling(0.0, 12)


# Notices that every run has, or that depend on the disk, and on whether the device's library rounds a row by
# the rows beside it.
_OF_THE_MACHINE = ("Computes on", "O_DIRECT", "the rounding of a row")


class _Told:
    """Takes notices, and keeps their texts."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, event: object) -> None:
        if isinstance(event, Notice) and not any(words in event.text for words in _OF_THE_MACHINE):
            self.texts.append(event.text)

    def one(self, *words: str) -> None:
        """One notice came, in one line, with these words."""
        assert len(self.texts) == 1, self.texts
        assert "\n" not in self.texts[0] and all(word in self.texts[0] for word in words), self.texts


def _answer(model: Path, told: _Told, **settings: Any) -> list[int]:
    given = {"draft": str(model), "dtype": "float32", "budget": 16, "width": 4, "context": 128}
    with offspec.load(str(model), device="cuda", notify=told, **(given | settings)) as engine:
        return list(engine.generate(PROMPT, PARAMS).token_ids)


@pytest.mark.exhaustive
def test_memory_that_cannot_be_pinned_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "_register", lambda arena: False)
    sizes = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 12}
    model, told = write_model(tmp_path / "model", **sizes), _Told()
    streaming = RUNTIME + SLACK + 60_000_000
    assert _answer(model, told, draft="none", vram=streaming) == reference(model, PROMPT, 12)
    told.one("pinned", "ulimit -l", "`memory`")


def test_graphs_that_cannot_be_captured_are_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TritonError(Exception):
        """Error like those of Triton, which are not RuntimeErrors."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise TritonError("out of resource: shared memory\nand more")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", refuse)
    model, told = write_model(tmp_path / "model"), _Told()
    assert _answer(model, told) == reference(model, PROMPT, 12)
    told.one("CUDA graph could not be captured", "out of resource")


def _refuse_triton(device: torch.device) -> None:
    raise RuntimeError("Failed to find C compiler")


@pytest.mark.parametrize("draft", sampled_params(["same", "none"], "none"))
def test_a_machine_without_a_compiler_is_reported(
    draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_refusals", {})
    monkeypatch.setattr(triton_check, "try_triton", _refuse_triton)
    model, told = write_model(tmp_path / "model"), _Told()
    expected = reference(model, PROMPT, 12)
    assert _answer(model, told, draft=str(model) if draft == "same" else draft) == expected
    told.one("torch's own operations", "C compiler")


@pytest.mark.exhaustive
def test_a_kernel_that_cannot_be_compiled_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found out while kernels are warmed, when all is loaded: it is loaded again."""
    from offspec_kernels.row_linear import triton as kernel

    def refuse(*args: Any) -> None:
        raise TypeError("ptxas died\nwith a long trace")

    monkeypatch.setattr(backend, "_refusals", {})
    monkeypatch.setattr(kernel, "row_linear", refuse)
    model, told = write_model(tmp_path / "model"), _Told()
    assert _answer(model, told) == reference(model, PROMPT, 12)
    told.one("torch's own operations", "ptxas died")


def test_an_answer_runs_no_kernel_that_loading_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name and by what is compiled in."""
    launched = _launches(monkeypatch)
    model = write_model(tmp_path / "model", hidden_size=64)
    with offspec.load(
        str(model), draft=str(model), device="cuda", dtype="float32", budget=16, width=4, context=512
    ) as engine:
        warmed = set(launched)
        for params in (PARAMS, sampling(0.8, 12, top_p=0.9)):
            engine.generate([3 + i % 90 for i in range(400)], params)
    assert {name for name, _ in warmed} >= {"_far_keys", "_near_keys", "_row_linear", "_move"}
    assert set(launched) <= warmed


def _launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(kernel, constants that are compiled in) of every launch from now on."""
    from triton.runtime import interpreter, jit

    seen = list[tuple[str, str]]()

    def note(function: Any, options: dict[str, Any]) -> None:
        constants = {name: value for name, value in options.items() if name.isupper()}
        seen.append((function.__name__, repr(sorted(constants.items()))))

    if backend.is_interpreted():
        call = interpreter.GridExecutor.__call__

        def interpret(self: Any, *args: Any, **kwargs: Any) -> Any:
            note(self.fn, kwargs)
            return call(self, *args, **kwargs)

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", interpret)
    else:
        run = jit.JITFunction.run

        def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
            note(self.fn, kwargs)
            return run(self, *args, **kwargs)

        monkeypatch.setattr(jit.JITFunction, "run", launch)
    return seen
