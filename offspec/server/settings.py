"""Settings of a server."""

from dataclasses import dataclass, field

from offspec.core.sampling_defaults import SamplingOverrides


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a server.

    Args:
        host: Address or name to listen at.
        port: Port to listen at; 0 for any that is free.
        names: What requests may call the model, the one that is shown first.
        key: What clients must send, as a bearer token or as x-api-key; None: nothing.
        sampling: Parameters of requests that do not set them, over the model's defaults.
        max_queue: Requests that may wait while others are answered.
        patience: Seconds that an answer under way may still take when the server is told to stop.
        tool_grammar: Calls of tools follow a grammar, from their opening mark on.
        open_schemas: Objects of a schema may have properties that it does not name.
        strict: Refuse requests with fields that are unknown or have no effect.
        origins: Origins of web pages that may use the server, in addition to its own; "*" for all.
        body_bytes: Most bytes of a request's body.
        body_seconds: Seconds until the whole of it has come.
        bodies_bytes: Most bytes of the bodies of all requests together.
        upload_bytes: Most bytes of a body with a file, which does not stay in memory.
        upload_seconds: Seconds until the whole of that has come.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    names: tuple[str, ...] = ()
    key: str | None = None
    sampling: SamplingOverrides = field(default_factory=SamplingOverrides)
    max_queue: int = 32
    patience: float = 5.0
    strict: bool = False
    tool_grammar: bool = True
    open_schemas: bool = False
    origins: tuple[str, ...] = ()
    body_bytes: int = 32 * 2**20
    body_seconds: float = 30.0
    bodies_bytes: int = 256 * 2**20
    upload_bytes: int = 64 * 2**20
    upload_seconds: float = 600.0
