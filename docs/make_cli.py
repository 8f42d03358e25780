"""Write docs/cli.md from the output of `--help`.

python docs/make_cli.py            write it
python docs/make_cli.py --check    exit 1 when it is not up to date
"""

import os
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).with_name("cli.md")
ROOT = Path(__file__).parents[1]
COMMANDS: tuple[tuple[str, ...], ...] = (
    (),
    ("generate",),
    ("chat",),
    ("serve",),
    ("batch",),
    ("plan",),
    ("pack",),
    ("distill",),
    ("hardware",),
    ("doctor",),
    ("demo",),
    ("models",),
    ("models", "pull"),
    ("models", "rm"),
    ("config",),
    ("config", "set"),
)

_INTRO = """# The command line

Written by `docs/make_cli.py` from what `--help` prints; `make docs` renews it.

```
offspec generate MODEL "your prompt" --memory 12GB
```

`MODEL` is a Hugging Face hub id, a folder, a `.gguf` file, `demo` or `demo-wide`. The main options:

| option | what it does |
|---|---|
| `--memory 12GB` | memory limit of the whole process; what does not fit streams from disk |
| `--vram 8GB` | memory limit on the GPU; what does not fit comes from RAM, then from disk |
| `--device cpu` | leave out the GPU; the default, `auto`, takes a usable GPU, else the CPU, and the \
first line of a run says which and why |
| `--device cuda:0,cuda:1` | divide the layers among two GPUs, or `all` |
| `--quantize nf4` | round the target to 4 bits, once, and run that |
| `--cpu-layers 8` | have the CPU compute layers where they lie in RAM, beside the GPU; pays with \
small trees |
| `--experts cpu` | have the CPU compute the experts of a mixture from RAM, beside the GPU; pays with \
small trees |
| `--draft suffix,MODEL` | [draft sources](drafts.md), one or several in one tree; the default is a 4-, 3- \
or 2-bit copy of the target, with `suffix` |
| `--temperature 0.7 --seed 1` | sample; the same seed gives the same answer |
| `--greedy` | temperature 0; without it and without sampling options, \
[the model's own sampling](serve.md#sampling-defaults) |
| `--check` | decode a second time without speculation and compare; a token that differs is a bug, and \
the exit code is 1 |
| `--json` | one JSON object with text, token ids and statistics |

Other commands:

```
offspec serve MODEL --memory 12GB               # OpenAI's API at http://127.0.0.1:8000/v1
offspec doctor                                  # does each part of this machine work, and what to do if not
offspec plan MODEL --memory 12GB --validate     # predicted speed beside measured speed
offspec hardware rtx-4090 --json > mine.json    # a hardware profile to edit, for plan --hardware mine.json
offspec pack MODEL --to nf4 --out DIR           # round a model once; resumes where it was interrupted
offspec distill MODEL --kind mlp --out DIR      # train a draft head on the model's own text
offspec models                                  # what is in the caches and what it needs; pull ID, rm ID
offspec config set memory 12GB                  # a default for generate, chat and plan; options win
offspec generate demo "Why is the sky blue?" --memory 1.2GB --trace run.json    # a timeline
```

`offspec --install-completion` has the shell complete commands, options and values: models on this machine,
draft sources, hardware presets, saved conversations and the keys of `offspec config`.

The answer goes to standard output as it comes. Everything else (progress, notices, statistics, the
report of `--check`) goes to standard error, so `offspec generate … > answer.txt` holds the answer and
nothing more. Bars and status lines appear only on a terminal; `NO_COLOR` is respected.

| exit code | meaning |
|---|---|
| 0 | the answer is complete |
| 1 | it cannot be done: no such model, a damaged file, not enough memory, a full disk; or `--check` found \
a bug |
| 2 | the request is wrong: an unknown option, a value out of range, an empty prompt |
| 130 | interrupted with Ctrl-C; the text that came stays (with `--json` nothing is printed) |
| 141 | the reader of standard output closed it, as `head -1` does |

An error is one line on standard error that begins with `error:` and names the fix where there is one.
In `offspec chat` such a line does not end the conversation; with questions from a pipe the exit code is
that of the last one.
A usage error is shown with the usage. A traceback is a bug: please report it.

`--json` prints one object: `text`, `token_ids`, `tokens`, `passes`, `tokens_per_pass`, `seconds`,
`ttft_s` (seconds to the first token), `tok_per_s`, `bytes_streamed` (weights copied to the GPU, or on a CPU
read from disk), `bytes_read` (weights read from disk), `peak_memory_bytes`,
`finish_reason` (`eos`, `stop`, `length`, `context`), `draft`, `budget`, `seed`, `sampling` (the temperature,
and filters and penalties that have an effect), `draft_seconds`, `target_seconds`, `prompt_tokens`,
`reused_tokens`; `mismatches`: null without `--check`, else a list of `index`, `token`, `unspeculated_token`
and `gap`; and `logprobs`: null without `--logprobs`, else for each token `token`, its `text`, `logprob`, and
`top`, a list of the likeliest tokens with the same keys.

`offspec plan` prints a page as wide as the terminal (80 columns where there is none, or `COLUMNS`), and
with `--json` the plan itself, which `--save` writes to a file that can be edited. With `--json --validate`
the plan is under `plan`, beside `seconds_per_pass`, `tok_per_s` and `tokens_per_pass` (medians over the
prompts, each `predicted`, `measured` and `error`, a share of what was measured) and `rows`, the same for
each prompt.

`offspec pack` prints the folder of the pack on standard output, and with `--json` one object: `folder`,
`model`, `format`, `files`, `kept` (files that were there before), `bytes`, `source_bytes` and `seconds`; with
`--verify` those of the pack that was verified, without `kept`, `source_bytes` and `seconds`.

`offspec models --json` prints a list of objects: `name`, `kind`, `folder`, `bytes`, `least_memory` and
`least_vram` (bytes, about; null where they are not known), and `tok_per_s`, `memory` and `vram` of the
fastest plan, or null. `offspec models pull` prints the folder of the model.

Defaults for the options of `generate`, `chat` and `plan` are kept in one file of keys and values, which
`offspec config` edits. A wrong key or value in it is an error that names the file and the line.

`offspec distill` prints the folder of the head on standard output, and with `--json` one object: `folder`,
`kind`, `bytes`, `tokens`, `epochs`, `steps`, `training_seconds`, `seconds`, and of text that was held out
`held_out_tokens`, `first_guess` and `first_five_guesses` (shares by depth), and `tokens_per_pass` with a tree
of `nodes` nodes.

`--trace FILE` writes a timeline in the trace-event format: open https://ui.perfetto.dev and drop the
file on it. From top to bottom it has a track for the passes (`engine`), the draft's steps, the walk that
verifies, the layers as they are computed (`wait`: compute stood still because a layer had not arrived
yet), the copies to a device that has memory of its own, and each thread that reads from disk. A curve
shows the bytes streamed. The file is written after an error or Ctrl-C too. It holds the settings and no
word of prompt or answer. At most 200,000 events are kept (some 60 MB in addition to `--memory`); the file
says how many are missing.
"""


def help_text(command: tuple[str, ...]) -> str:
    """Output of `offspec COMMAND --help`, 100 columns wide and without colour."""
    # A small environment of our own: terminals, CI systems and FORCE_COLOR all change what rich prints.
    environment = {
        "PATH": os.environ.get("PATH", ""),
        "PYTHONPATH": str(ROOT),
        "PYTHONIOENCODING": "utf-8",
        "COLUMNS": "100",
        "TERMINAL_WIDTH": "100",
        "NO_COLOR": "1",
        "TERM": "dumb",
        "OFFSPEC_CONFIG": "/nonexistent",  # no defaults of whoever runs this
    }
    shown = subprocess.run(
        [sys.executable, "-m", "offspec", *command, "--help"],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    lines = (line.rstrip() for line in shown.stdout.decode("utf-8").splitlines())
    return "\n".join(lines).strip("\n")


def page() -> str:
    """The whole of docs/cli.md."""
    sections = [_INTRO]
    for command in COMMANDS:
        name = " ".join(("offspec", *command))
        sections.append(f"## `{name}`\n\n```text\n{help_text(command)}\n```\n")
    return "\n".join(sections)


def main() -> int:
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print("docs/cli.md is not what --help prints; run `make docs`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
