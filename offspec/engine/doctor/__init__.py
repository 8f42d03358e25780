"""Checks of this machine's hardware and software for `offspec doctor`.

The entry point is `run_checks`. Checks run in a separate process (`worker`), so a crash is reported, too.
Each check is a module with a function `check` that yields findings.
"""
