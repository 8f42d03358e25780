"""A server in a process that may be killed. It says its port, and ends when its stdin does."""

import sys

from tests.server.batch_program import RandomAnswers
from tests.support.live_server import LiveServer


def main() -> None:
    with LiveServer(RandomAnswers(delay=0.004)) as server:
        print(server.port, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
