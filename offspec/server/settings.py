"""Settings of a server."""

from dataclasses import dataclass, field

from offspec.core.sampling_defaults import SamplingOverrides
from offspec.server.connections import LimitedConnection


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may take.

    Args:
        body_bytes: Of its body.
        body_seconds: Until the whole of it has come.
        bodies_bytes: Of its body and those of all requests beside it.
        upload_bytes: Of a body with a file, which does not stay in memory.
        upload_seconds: Until the whole of that has come.
    """

    body_bytes: int = 32 * 2**20
    body_seconds: float = 30.0
    bodies_bytes: int = 256 * 2**20
    upload_bytes: int = 64 * 2**20
    upload_seconds: float = 600.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How to serve.

    Args:
        host: Address or name to listen at.
        port: Port to listen at; 0 for any that is free.
        names: What requests may call the model, the one that is shown first.
        key: What clients must send, as a bearer token or as x-api-key; None: nothing.
        sampling: Parameters of requests that do not set them, over the model's defaults.
        max_queue: Requests that may wait while others are answered.
        patience: Seconds that an answer under way may still take when the server is told to stop.
        limits: What a request may take.
        tool_grammar: Calls of tools follow a grammar, from their opening mark on.
        open_schemas: Objects of a schema may have properties that it does not name.
        strict: Refuse requests with fields that are unknown or have no effect.
        origins: Origins of web pages that may use the server, in addition to its own; "*" for all.
        connection: The protocol of a connection, with limits of its own.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    names: tuple[str, ...] = ()
    key: str | None = None
    sampling: SamplingOverrides = field(default_factory=SamplingOverrides)
    max_queue: int = 32
    patience: float = 5.0
    limits: Limits = field(default_factory=Limits)
    strict: bool = False
    tool_grammar: bool = True
    open_schemas: bool = False
    origins: tuple[str, ...] = ()
    connection: type[LimitedConnection] = LimitedConnection
