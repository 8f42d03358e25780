"""The work of an actor: an engine of its own answers lines, as in `offspec batch`."""

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
from offspec.server.batch.answering import Answering
from offspec.server.batch.lines import Line
from offspec.server.service import Loader, Service
from offspec.server.settings import Settings

if TYPE_CHECKING:
    from offspec.engine.engine import Engine

_CLOSING_S = 60.0


def loader(config: EngineConfig, plan: Path | None = None) -> Loader:
    """A loader of an engine on the machine where it is called. It can be pickled."""
    return partial(_load, config, plan)


def _load(config: EngineConfig, plan: Path | None, notify: Callable[[Event], None]) -> "Engine":
    from offspec.engine.load import load  # only where it is called: it imports torch

    return load(config, plan=plan, notify=notify)


class Answerer:
    """Answers lines.

    Args:
        load: Loads the engine, in a thread of its own.
        names: What lines may call the model.
        sampling: Parameters of lines that do not set them, over the model's defaults.
        in_flight: Lines that are asked at a time. None: one more than the engine answers side by side.

    Where the model cannot be loaded `answer` says so: Ray makes an actor again that fails as it is made.
    """

    def __init__(
        self,
        load: Loader,
        names: Sequence[str],
        sampling: SamplingOverrides | None = None,
        in_flight: int | None = None,
    ) -> None:
        settings = Settings(names=tuple(names), sampling=sampling or SamplingOverrides())
        self._service = Service(load, settings)
        self._in_flight = in_flight
        self._service.start()
        while self._service.state == "loading":
            time.sleep(0.02)
        self._loop = asyncio.new_event_loop()
        self.close = weakref.finalize(self, _close, self._service, self._loop)

    def answer(self, lines: Sequence[Line]) -> dict[int, tuple[int, dict[str, Any]]]:
        """Status and body of each answer, by the number of its line.

        Raises:
            OffspecError: The model could not be loaded, or its engine fails again and again.
        """
        if (error := self._service.error) is not None:
            # Of the base class, which can be pickled without the fields that some of the others have.
            raise OffspecError(str(error)) if isinstance(error, OffspecError) else error
        found = dict[int, tuple[int, dict[str, Any]]]()

        async def take(line: Line, status: int, value: dict[str, Any]) -> None:
            found[line.number] = status, value

        count = self._in_flight or self._service.engine.sequences + 1
        answering = Answering(self._service, self._service.names[0], take, in_flight=count)
        self._loop.run_until_complete(answering.run(iter(lines)))
        return found


def _close(service: Service, loop: asyncio.AbstractEventLoop) -> None:
    """Close the engine, which saves what it has learnt."""
    loop.run_until_complete(service.stop(0))
    service.join(_CLOSING_S)
    loop.close()
