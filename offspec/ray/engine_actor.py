"""Ray actor with its own engine, which answers lines like `offspec batch`."""

import asyncio
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offspec.core.config import EngineConfig
from offspec.core.errors import OffspecError
from offspec.core.events import Event
from offspec.core.sampling_defaults import SamplingOverrides
from offspec.server.batch.line_processor import LineProcessor
from offspec.server.batch.lines import Line
from offspec.server.service import Loader, Service
from offspec.server.settings import Settings

if TYPE_CHECKING:
    from offspec.engine.engine import Engine

_CLOSING_S = 60.0


def engine_loader(config: EngineConfig, plan: Path | None = None) -> Loader:
    """Return a picklable loader, which loads the engine on the machine where it is called."""
    return partial(_load, config, plan)


def _load(config: EngineConfig, plan: Path | None, notify: Callable[[Event], None]) -> "Engine":
    from offspec.engine.load import load  # imported only in the actor, because it imports torch

    return load(config, plan=plan, notify=notify)


class EngineActor:
    """Actor that answers lines.

    If the model cannot be loaded, `answer` raises the error, because Ray restarts an actor whose constructor
    fails.

    Args:
        load: Loads the engine, in a separate thread.
        names: Accepted model names in lines.
        sampling: Sampling parameters that override the model's defaults, for lines that do not set them.
        in_flight: Number of concurrent lines. None: one more than the engine's concurrent sequences.
    """

    def __init__(
        self,
        load: Loader,
        names: Sequence[str],
        sampling: SamplingOverrides | None = None,
        in_flight: int | None = None,
    ) -> None:
        settings = Settings(served_model_names=tuple(names), sampling=sampling or SamplingOverrides())
        self._service = Service(load, settings)
        self._in_flight = in_flight
        self._service.start()
        while self._service.state == "loading":
            time.sleep(0.02)
        self._loop = asyncio.new_event_loop()
        self.close = weakref.finalize(self, _close, self._service, self._loop)

    def answer(self, lines: Sequence[Line]) -> dict[int, tuple[int, dict[str, Any]]]:
        """Return the status and body of each answer, by the number of its line.

        Raises:
            OffspecError: The model could not be loaded, or its engine fails repeatedly.
        """
        if (error := self._service.error) is not None:
            # The base class can be pickled; some subclasses need further arguments.
            raise OffspecError(str(error)) if isinstance(error, OffspecError) else error
        results = dict[int, tuple[int, dict[str, Any]]]()

        async def take(line: Line, status: int, value: dict[str, Any]) -> None:
            results[line.number] = status, value

        count = self._in_flight or self._service.engine.sequences + 1
        processor = LineProcessor(self._service, self._service.names[0], take, in_flight=count)
        self._loop.run_until_complete(processor.run(iter(lines)))
        return results


def _close(service: Service, loop: asyncio.AbstractEventLoop) -> None:
    """Close the engine, which saves its learned statistics."""
    loop.run_until_complete(service.stop(0))
    service.join(_CLOSING_S)
    loop.close()
