"""Runs a server in a process that a test may kill. It prints its port, and ends when its stdin closes."""

import socket
import sys
import threading

from offspec.server.run import Server
from offspec.server.settings import Settings
from tests.server.batch_program import RandomAnswers
from tests.support.waiting import wait_until


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    settings = Settings("127.0.0.1", port, served_model_names=("tiny",))
    server = Server(RandomAnswers(delay=0.004).opened, settings, listener)
    threading.Thread(target=server.run, daemon=True).start()
    wait_until(lambda: server.service.state == "ready")
    print(port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
