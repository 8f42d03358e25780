"""What the line mode shows on request, as Markdown that reads well as it is."""

import json

from offspec.chat.archive import Archive
from offspec.core.events import TreeSeen
from offspec.ui.chat.commands import COMMANDS
from offspec.ui.chat.controller import Desk
from offspec.ui.chat.outcomes import View
from offspec.ui.chat.report import report
from offspec_planners.plan.explain import explain

_BESIDE = 3  # rejected guesses shown beside an accepted one
_SESSIONS = 20


def page(view: View, desk: Desk) -> str:
    """A view that the terminal UI has a screen for."""
    match view:
        case "help":
            return help_page()
        case "tree":
            return tree_page(desk.trees[-1])
        case "stats":
            return report(desk)
        case "sessions":
            return sessions_page(desk.archive)
        case "plan":
            assert desk.engine.plan is not None
            return "\n\n".join(explain(desk.engine.plan))


def help_page() -> str:
    """All commands, and how questions are written."""
    commands = [f"- `{command.usage}`: {command.help}" for command in COMMANDS.values()]
    return "\n".join(
        (
            *commands,
            "",
            "A line is a question. One that ends in `\\` goes on in the next; between two lines of "
            '`"""` stands a question of many lines. Ctrl-C stops an answer, and leaves where there is none.',
        )
    )


def tree_page(tree: TreeSeen) -> str:
    """The path that the target took, and what else was guessed at each of its steps."""
    lines = []
    for step, (above, node) in enumerate(zip(tree.accepted, tree.accepted[1:], strict=False), 1):
        lines.append(f"{step:>3}  {_node(tree, node):<28}{_beside(tree, above, node)}")
    bonus = f"{_quoted(tree.bonus)} by the target"
    lines.append(f"  +  {bonus:<28}{_beside(tree, tree.accepted[-1], None)}")
    nodes = len(tree.parent)
    head = f"Pass {tree.index}: {nodes:,} {'node' if nodes == 1 else 'nodes'}, and the path that was taken."
    return "\n".join((head, "", "```text", *(line.rstrip() for line in lines), "```"))


def _beside(tree: TreeSeen, above: int, taken: int | None) -> str:
    """The likeliest other guesses below a node."""
    others = [i for i, parent in enumerate(tree.parent) if parent == above and i != taken]
    others.sort(key=lambda i: -tree.probability[i])
    return f"  not {', '.join(_node(tree, i) for i in others[:_BESIDE])}" if others else ""


def _node(tree: TreeSeen, node: int) -> str:
    return f"{_quoted(tree.text[node])} {tree.probability[node]:.2f}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def sessions_page(archive: Archive) -> str:
    """The latest conversations, those that changed last first."""
    entries = archive.list()
    if not entries:
        return "No conversation is saved yet."
    lines = [
        f"- **{entry.title}**, {entry.turns} question{'' if entry.turns == 1 else 's'} to {entry.model}, "
        f"{entry.updated} (`{entry.id}`)"
        for entry in entries[:_SESSIONS]
    ]
    if len(entries) > _SESSIONS:
        lines.append(f"- and {len(entries) - _SESSIONS} more in `{archive.folder}`")
    return "\n".join((*lines, "", "`/load` and a name, or the beginning of an id, goes on with one."))
