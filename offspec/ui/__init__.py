"""User interfaces: the command line, the terminal UI, and the chat code that both share.

Options and keys become requests, events become text. No code here handles tensors.
"""
