"""Trees to draw: one that reads like a sentence, and large ones."""

from offspec.core.events import TreeSeen


def tree(
    parent: list[int], text: list[str], chance: list[float], accepted: list[int], bonus: str, index: int = 1
) -> TreeSeen:
    """chance: probability of each token after its parent; the paths' probabilities follow from it."""
    probability: list[float] = []
    for above, share in zip(parent, chance, strict=True):
        probability.append(share * (probability[above] if above >= 0 else 1.0))
    return TreeSeen(index, tuple(parent), tuple(text), tuple(probability), tuple(accepted), bonus)


def sentence() -> TreeSeen:
    """Two draft tokens were accepted; the first has five siblings, one of which has children."""
    return tree(
        parent=[-1, 0, 0, 0, 0, 0, 0, 1, 1, 2, 9],
        text=["\n", "The", "Because", "It", "A", "Sun", "Light", " sky", " blue", " light", " scatters"],
        chance=[1.0, 0.5, 0.25, 0.1, 0.05, 0.03, 0.02, 0.8, 0.1, 0.5, 0.5],
        accepted=[0, 1, 7],
        bonus=" is",
    )


def chain(count: int) -> TreeSeen:
    """A fully rejected tree that is a single path."""
    return tree(
        parent=list(range(-1, count - 1)),
        text=["root", *(f" w{node}" for node in range(1, count))],
        chance=[1.0, *[0.999] * (count - 1)],
        accepted=[0],
        bonus="!",
    )


def bush(count: int) -> TreeSeen:
    """A tree that is as wide as it is deep."""
    return tree(
        parent=[-1, *((node - 1) // 3 for node in range(1, count))],
        text=["root", *(f" w{node}" for node in range(1, count))],
        chance=[1.0, *[(0.6, 0.3, 0.05)[(node - 1) % 3] for node in range(1, count)]],
        accepted=[0, 1, 4],
        bonus="!",
    )
