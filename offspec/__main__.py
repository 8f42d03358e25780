"""Entry point of `offspec` and `python -m offspec`, which can be interrupted even during imports."""

import signal


def main() -> None:
    """Import and run the program. Exits with SystemExit.

    During the import Ctrl-C ends the process with the system's default action, without a traceback.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # otherwise SIGINT is ignored, as under nohup or in scripts
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from offspec.ui.cli.main import main as program

    program()


if __name__ == "__main__":
    main()
