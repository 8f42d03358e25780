"""The server: HTTP requests of clients' own APIs become requests of one engine, and its events their answers.

Each API is one file that maps its bodies to an `Ask` and the events of an answer back. Nothing here handles a
tensor, and nothing but `service` knows how the engine is shared.
"""
