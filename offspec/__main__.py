"""The program `offspec`, and `python -m offspec`: it can be interrupted before it is imported, too."""

import signal


def main() -> None:
    """Import the program, and run it. Leaves by SystemExit.

    Until it is there Ctrl-C ends the process as the system does, without a traceback through the imports.
    """
    heard = signal.getsignal(signal.SIGINT)
    if heard is signal.default_int_handler:  # else it is ignored, as behind nohup and in scripts
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from offspec.ui.cli.main import main as program

    program()


if __name__ == "__main__":
    main()
