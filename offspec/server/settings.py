"""Settings of a server."""

from dataclasses import dataclass, field

from offspec.core.sampling_defaults import SamplingOverrides


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a server.

    Args:
        host: Address or name to listen on.
        port: Port to listen on; 0 for a free one.
        served_model_names: Names of the model that requests may use, the default first.
        api_key: Key that clients must send as a bearer token or as x-api-key. None: no key is required.
        sampling: Default sampling parameters of requests, overriding the model's.
        max_queue: Maximum number of queued requests.
        shutdown_timeout: Seconds that running answers may take after a stop signal.
        tool_grammar: Whether a grammar constrains tool calls after their opening mark.
        open_schemas: Whether objects may have properties that their schema does not list.
        strict: Whether requests with unknown fields or fields without effect are refused.
        origins: Origins of web pages that may use the server, in addition to its own; "*" for all.
        body_bytes: Largest body of a request, in bytes.
        body_seconds: Time limit for receiving a body, in seconds.
        bodies_bytes: Largest total size of the bodies of all requests, in bytes.
        upload_bytes: Largest body with a file, which is not kept in memory, in bytes.
        upload_seconds: Time limit for receiving a file, in seconds.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    api_key: str | None = None
    sampling: SamplingOverrides = field(default_factory=SamplingOverrides)
    max_queue: int = 32
    shutdown_timeout: float = 5.0
    strict: bool = False
    tool_grammar: bool = True
    open_schemas: bool = False
    origins: tuple[str, ...] = ()
    body_bytes: int = 32 * 2**20
    body_seconds: float = 30.0
    bodies_bytes: int = 256 * 2**20
    upload_bytes: int = 64 * 2**20
    upload_seconds: float = 600.0
