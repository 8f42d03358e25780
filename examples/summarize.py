"""Summarize text files, one after the other: python examples/summarize.py MODEL FILE..."""

import sys
from pathlib import Path

import offspec

model, *files = sys.argv[1:]
params = offspec.SamplingParams(max_tokens=200)
template = {"enable_thinking": False}  # skips the reasoning of reasoning models
try:
    with offspec.load(model) as engine:
        for file in files:
            prompt = f"Summarize this text in three sentences.\n\n{Path(file).read_text('utf-8')}"
            tokens = engine.count_tokens(prompt, chat_template_kwargs=template)
            print(f"{file}, {tokens} of {engine.context} tokens:")
            for event in engine.stream(prompt, params, chat_template_kwargs=template):
                if isinstance(event, offspec.TextDelta):
                    print(event.text, end="", flush=True)
            print("\n")
except offspec.OffspecError as error:
    sys.exit(f"error: {error}")
