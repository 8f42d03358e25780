"""What people see: the command line, the terminal UI, and what all faces of a chat share.

Options and keys become requests, events become text. Nothing here sees a tensor.
"""
