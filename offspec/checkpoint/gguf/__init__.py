"""GGUF files: what their headers say, where each weight lies, and the text files that go with them."""
