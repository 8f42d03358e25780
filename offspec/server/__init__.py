"""HTTP server with the APIs of OpenAI, Anthropic, Ollama and llama.cpp, for one model and its engine.

Each API converts its request bodies to a `GenerateRequest`, and the deltas of the answer back with a `Reply`.
No code here handles tensors, and only `service` shares the engine among requests.
"""
