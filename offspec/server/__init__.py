"""The server: HTTP requests of clients' own APIs become requests of one engine, and its events their answers.

Each API maps its bodies to a `GenerateRequest`, and the deltas of an answer back with a `Reply`. Nothing here
handles a tensor, and nothing but `service` knows how the engine is shared.
"""
