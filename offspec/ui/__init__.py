"""What people see: the command line, the terminal UI, and what both share of a chat.

Options and keys become requests, events become text. Nothing here sees a tensor.
"""
