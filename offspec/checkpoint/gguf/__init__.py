"""GGUF files: their headers, the location of each weight, and their tokenizer and configuration files."""
