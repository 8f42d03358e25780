"""`python -m offspec` is the same program as `offspec`."""

from offspec.ui.cli.main import main

if __name__ == "__main__":
    main()
