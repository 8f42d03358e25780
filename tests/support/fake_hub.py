"""A small Hugging Face Hub on the loopback address, limited to what huggingface_hub requests."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Repositories by id, each a dict of file contents; a record of requests; and faults to simulate.

    gated: ids that need permission. cut: file names whose first response breaks off halfway (once). dead:
        file names that always break off. stalled: file names whose response stops halfway, until the client
        disconnects. log: (method, path, Range header) of every request.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.cut: set[str] = set()
        self.dead: set[str] = set()
        self.stalled: set[str] = set()
        self.log: list[tuple[str, str, str | None]] = []
        self.url = ""

    def begin(self, repositories: dict[str, dict[str, bytes]]) -> None:
        """Serve only these repositories, and clear all faults."""
        self.repositories = repositories
        for record in (self.gated, self.cut, self.dead, self.stalled, self.log):
            record.clear()

    def downloads(self) -> list[str]:
        """Names of the files whose contents were requested."""
        asked = [path for method, path, _ in self.log if method == "GET" and "/resolve/" in path]
        return [path.rpartition("/")[2] for path in asked]


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    class Handler(_Handler):
        standin = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    standin: FakeHub

    def do_HEAD(self) -> None:
        self.answer(send=False)

    def do_GET(self) -> None:
        self.answer(send=True)

    def answer(self, send: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.standin.log.append((self.command, path, self.headers["Range"]))
        if info := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self.info(info[1], info[2])
        elif file := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self.file(file[1], file[2], file[3], send)
        else:
            self.fail(404, "")

    def info(self, repository: str, revision: str | None) -> None:
        files = self.standin.repositories.get(repository)
        if files is None:
            return self.fail(401, "RepoNotFound")
        if revision not in (None, "main", COMMIT):
            return self.fail(404, "RevisionNotFound")
        siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
        body = json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def file(self, repository: str, revision: str, name: str, send: bool) -> None:
        files = self.standin.repositories.get(repository)
        if files is None:
            return self.fail(401, "RepoNotFound")
        if repository in self.standin.gated:
            return self.fail(403, "GatedRepo")
        if name not in files or revision not in ("main", COMMIT):
            return self.fail(404, "EntryNotFound")
        data = files[name]
        start = int(match[1]) if (match := re.match(r"bytes=(\d+)-", self.headers["Range"] or "")) else 0
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if not send:
            return None
        if name in self.standin.stalled:
            self.wfile.write(data[start : start + (len(data) - start) // 2])
            self.connection.recv(1)  # until the client disconnects
            self.close_connection = True
            return None
        if name in self.standin.cut | self.standin.dead:
            self.standin.cut.discard(name)
            data = data[: start + (len(data) - start) // 2]
            self.close_connection = True
        self.wfile.write(data[start:])
        return None

    def fail(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", "no")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass
