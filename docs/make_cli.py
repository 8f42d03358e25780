"""Generate docs/cli.md from the output of `--help`.

python docs/make_cli.py            write the page
python docs/make_cli.py --check    exit 1 if the page is not up to date
"""

import os
import subprocess
import sys
from pathlib import Path

from offspec.ui.cli.short_help import MAIN_OPTIONS

PAGE = Path(__file__).with_name("cli.md")
ROOT = Path(__file__).parents[1]
COMMANDS: tuple[tuple[str, ...], ...] = (
    (),
    ("generate",),
    ("chat",),
    ("serve",),
    ("batch",),
    ("plan",),
    ("bench",),
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

`docs/make_cli.py` generates this page from `--help`; `make docs` updates it.

```
offspec generate MODEL "your prompt" --memory 12GB
```

`MODEL` is a Hugging Face id, a folder, a `.gguf` file, `demo` (a small model that `make env` installs) or
`demo-wide` (that model widened 16 times). Main options:

| option | effect |
|---|---|
| `--memory 12GB` | limits the memory of the whole process; weights that do not fit are streamed from disk |
| `--vram 8GB` | limits GPU memory; weights that do not fit are streamed from RAM or disk |
| `--device cpu` | ignores the GPU |
| `--device cuda:0,cuda:1` | divides the layers between two GPUs; `all` uses all GPUs; drafts run on the \
first |
| `--quantize nf4` | quantizes the target to 4 bits, once, and runs that |
| `--draft suffix,MODEL` | selects [draft sources](drafts.md); the default is a self-draft with 4, 3 or 2 \
bits, plus `suffix` |
| `--temperature 0.7 --seed 1` | samples; the same seed gives the same answer |
| `--greedy` | sets temperature 0; otherwise omitted sampling options get the [model's sampling \
defaults](serve.md#sampling-defaults) |
| `--check` | decodes again without speculation and compares; a difference is a bug |
| `--json` | prints one JSON object with text, token ids and statistics |

Other commands:

```
offspec serve MODEL --memory 12GB               # OpenAI-compatible API at http://127.0.0.1:8000/v1
offspec doctor                                  # test each part of this machine
offspec plan MODEL --memory 12GB --validate     # compare predicted with measured speed
offspec hardware rtx-4090 --json > mine.json    # hardware profile to edit, for plan --hardware mine.json
offspec pack MODEL --to nf4 --out DIR           # quantize a model; resumes after an interruption
offspec distill MODEL --kind mlp --out DIR      # train a draft head on the model's own text
offspec models                                  # list cached models; pull ID, rm ID
offspec config set memory 12GB                  # set a default; options take precedence
offspec generate demo "Why is the sky blue?" --memory 1.2GB --trace run.json    # write a timeline
```

`offspec --install-completion` installs shell completion of commands, options and values.

## Notes on options

- `--device auto` selects the first usable GPU, else the CPU. The first line of a run names the choice and
  the reason.
- `--cpu-layers` and `--experts cpu` compute layers or MoE experts on the CPU, from RAM; only activations
  cross to the GPU and back. This is faster with small trees (see `offspec plan`) and slower with long
  prompts. CPU and GPU round differently, so in bfloat16 or with `--kv-cache int8` answers depend on these
  options, and `auto` leaves the GPU to compute everything. In float32, `auto` selects what the plan
  predicts to be faster.
- `--experts gpu` copies experts that do not fit in GPU memory on demand, when the router selects them.
- `--cache-size` stores the KV cache of a conversation when another one replaces it and when the program
  ends. It is read back if that is faster than processing the prompt again. Other users cannot read the
  files.
- `--width` and `--budget` are chosen by a plan, which is made on first use. With numbers for both, trees
  have that size, but speculation still pauses while passes without it are faster.
- `--verify coupled` lets drafts be accepted at any temperature. `plain` ranks draft tokens by probability
  alone, and `sequoia` samples them from the draft; both are for comparison.
- `--sequences` processes requests together, so that they share each transfer of the weights. `auto` adds
  sequences, up to 8, as long as their KV caches displace hardly any layer from memory.
- `--json-schema` adds no properties that the schema does not name, because small models tend to invent one
  after another; `--open-schemas` allows them.
- `--draft-bits` applies to a named draft or the self-draft. A named draft keeps its own precision by default.
- `distill --minutes` covers opening the model, generating text, training and measuring; steps without time
  left are skipped.

## Output and exit codes

The answer goes to standard output as it is generated. Progress, notices, statistics and the report of
`--check` go to standard error, so `offspec generate … > answer.txt` writes only the answer. Progress bars
appear only on a terminal; `NO_COLOR` is respected.

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | failure: unknown model, damaged file, not enough memory, full disk; or `--check` found a bug |
| 2 | invalid request: unknown option, value out of range, empty prompt |
| 130 | interrupted with Ctrl-C; the text so far stays (with `--json` nothing is printed) |
| 141 | standard output was closed by its reader, as by `head -1` |

An error is one line on standard error that begins with `error:` and, if possible, names a remedy. Usage
errors also show the usage. A traceback is a bug: please report it. In `offspec chat` an error does not end
the conversation; with questions from a pipe, the exit code is that of the last error.

## JSON output

`generate --json` prints one object:

- `text`, `token_ids`, `tokens`, `passes`, `tokens_per_pass`, `seconds`, `ttft_s` (seconds to the first
  token), `tok_per_s`, `finish_reason` (`eos`, `stop`, `length`, `context`)
- `bytes_streamed` (weights copied to the GPU, or without a GPU read from disk), `bytes_read` (weights read
  from disk), `peak_memory_bytes`
- `draft`, `budget`, `seed`, `sampling` (temperature, and filters and penalties that have an effect),
  `draft_seconds`, `target_seconds`, `prompt_tokens`, `reused_tokens`
- `mismatches`: null without `--check`, otherwise a list of `index`, `token`, `unspeculated_token` and `gap`
- `logprobs`: null without `--logprobs`, otherwise for each token `token`, `text`, `logprob`, and `top`, a
  list of the most likely tokens with the same keys

`plan --json` prints the plan, which `--save` writes to a file that can be edited. With `--validate`, the
plan is under `plan`, next to `seconds_per_pass`, `tok_per_s` and `tokens_per_pass` (medians over the
prompts, each with `predicted`, `measured` and the relative `error`) and `rows`, the same for each prompt.

`pack --json` prints `folder`, `model`, `format`, `files`, `kept` (files that existed before), `bytes`,
`source_bytes` and `seconds`. With `--verify`, it describes the verified pack and omits `kept`,
`source_bytes` and `seconds`. Without `--json`, `pack` prints the folder.

`distill --json` prints `folder`, `kind`, `bytes`, `tokens`, `epochs`, `steps`, `training_seconds`,
`seconds`, and for held-out text `held_out_tokens`, `first_guess` and `first_five_guesses` (top-1 and top-5
accuracy by depth), and `tokens_per_pass` with a tree of `nodes` nodes. Without `--json`, `distill` prints
the folder.

`models --json` prints a list of objects: `name`, `kind`, `folder`, `bytes`, `least_memory` and `least_vram`
(approximate minimum in bytes, or null if unknown), and `tok_per_s`, `memory` and `vram` of the fastest
plan, or null. `models pull` prints the folder of the model.

## Other files and settings

`offspec plan` prints a page as wide as the terminal (without a terminal 80 columns, or `COLUMNS`).

`offspec config` edits one file of keys and values with defaults of options. An error about this file names
the line.

`--trace FILE` writes a timeline in the trace-event format, to open at https://ui.perfetto.dev. It has
tracks for passes (`engine`), draft steps, verification, layers as they are computed (`wait`: a layer had
not arrived yet), copies to the GPU, and each reader thread, and a curve of the bytes streamed. The file is
also written after an error or Ctrl-C. It holds the settings, but no text of prompt or answer. At most
200,000 events are kept (about 60 MB in addition to `--memory`); the file states how many are missing.
"""


def help_text(command: tuple[str, ...]) -> str:
    """Whole help of a command, 100 columns wide and without colour."""
    # A fixed environment, because terminals, CI systems and FORCE_COLOR change the output of rich.
    environment = {
        "PATH": os.environ.get("PATH", ""),
        "PYTHONPATH": str(ROOT),
        "PYTHONIOENCODING": "utf-8",
        "COLUMNS": "100",
        "TERMINAL_WIDTH": "100",
        "NO_COLOR": "1",
        "TERM": "dumb",
        "OFFSPEC_CONFIG": "/nonexistent",  # ignore defaults of the user
    }
    option = "--help-all" if command and command[0] in MAIN_OPTIONS else "--help"
    shown = subprocess.run(
        [sys.executable, "-m", "offspec", *command, option],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    lines = (line.rstrip() for line in shown.stdout.decode("utf-8").splitlines())
    return "\n".join(lines).strip("\n")


def page() -> str:
    """Return the text of docs/cli.md."""
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
    print("docs/cli.md differs from the output of --help; run `make docs`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
