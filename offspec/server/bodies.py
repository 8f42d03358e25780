"""Bodies of requests: how long they may be and take, whole in memory or as they come."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Send

from offspec.server.faults import Fault


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


def limited(
    limits: Limits, headers: Headers, receive: Receive, upload: bool, take: Callable[[int], None]
) -> Receive:
    """What gives a body as it comes. It raises Fault where that is too long or comes too slowly.

    upload: it is a form with a file. take: told of the bytes of other bodies.
    """
    size, whole = 0, False
    most = limits.upload_bytes if upload else limits.body_bytes
    seconds = limits.upload_seconds if upload else limits.body_seconds
    deadline = asyncio.get_running_loop().time() + seconds
    too_large = Fault("too_large", f"the body is larger than {most} bytes")
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > most:
        raise too_large

    async def give() -> Message:
        nonlocal size, whole
        if whole:
            return await receive()
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise Fault("timeout", "the body did not come in time") from None
        if message["type"] == "http.disconnect":
            raise Fault("invalid_request", "the client left before its body had come")
        size += len(message.get("body", b""))
        if size > most:
            raise too_large
        if not upload:
            take(len(message.get("body", b"")))
        whole = not message.get("more_body", False)
        return message

    return give


def closing(send: Send) -> Send:
    """What sends an answer, and ends the connection after an error: what is left of the body is not read."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            MutableHeaders(raw=message.setdefault("headers", []))["connection"] = "close"
        await send(message)

    return sending


def replayed(body: bytes, receive: Receive) -> Receive:
    """What gives the body once more, and then whatever comes."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
