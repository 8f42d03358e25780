"""The record behind each figure of README.md, docs/figures.md and docs/quickstart.md.

tests/docs/test_figures.py compares them. `record` reads records, `block` declares figures, `results` has what
several pages quote. The other modules list the blocks of a page, or of some sections of docs/figures.md.
"""

from docs.figure_records.figures_cpu import CPU
from docs.figure_records.figures_gpu import GPU
from docs.figure_records.figures_plans import PLANS
from docs.figure_records.figures_ui import UI
from docs.figure_records.quickstart import QUICKSTART
from docs.figure_records.readme import README

PAGES = {"README.md": README, "docs/figures.md": (*CPU, *PLANS, *GPU, *UI), "docs/quickstart.md": QUICKSTART}
