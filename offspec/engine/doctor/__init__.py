"""What this machine has and whether each part of it works, for `offspec doctor`.

`examine` is what others call. The checks run in a process of their own (`worker`), so that one that takes its
process down is reported too; each is a file here with a function `check`, which yields its findings.
"""
