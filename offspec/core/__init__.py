"""What every room uses: settings, errors, events, the trace of a run, files and memory of the process.

Plain values come in and go out. Nothing here knows a tensor or imports torch.
"""
