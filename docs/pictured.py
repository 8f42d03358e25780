"""Content of the pictures of `offspec chat`: a conversation, figures and a tree, all made up."""

from offspec.core.events import PassStats, TreeSeen

QUESTIONS = (
    "Why is the sky blue, and a sunset red?",
    "Show me in Python how much more blue is scattered than red.",
)
ANSWERS = (
    """<think>
Rayleigh scattering goes with the inverse fourth power of the wavelength. At sunset the path through the air
is long, so little blue is left.
</think>

Sunlight holds all colours, and the molecules of the air scatter the **short wavelengths** most.

- By day, scattered blue light reaches you from every direction.
- At sunset the light has come a long way through the air. Most of the blue has left the beam, and *red* is \
what arrives.""",
    """The strength goes with the inverse fourth power of the wavelength:

```python
def scattered(wavelength_nm: float) -> float:
    return wavelength_nm**-4

ratio = scattered(450) / scattered(650)
print(f"blue is scattered {ratio:.1f} times as much")  # 4.4
```

So of two beams of equal strength, the blue one loses **4.4 times** as much on its way.""",
)

_EMITTED = (
    17,
    9,
    14,
    22,
    19,
    11,
    25,
    16,
    8,
    13,
    21,
    27,
    18,
    12,
    20,
    24,
    15,
    7,
    19,
    28,
    22,
    14,
    17,
    26,
    11,
    18,
    23,
    16,
    20,
    13,
)

# A step of the path: the token that was accepted, its probability, and the draft tokens next to it.
_STEPS: tuple[tuple[str, float, tuple[tuple[str, float], ...]], ...] = (
    (" the", 0.74, ((" of two beams", 0.11), (" a beam of", 0.06), (" blue light", 0.04), (" as", 0.02))),
    (" blue", 0.81, ((" shorter the wavelength", 0.09), (" red one", 0.05), (" beam", 0.02))),
    (
        " one",
        0.66,
        ((" light is scattered far", 0.18), (" beam loses", 0.09), (" ray", 0.03), (" part", 0.02)),
    ),
    (" loses", 0.58, ((" is weakened about", 0.21), (" has lost", 0.08), (" fades", 0.05), (",\n", 0.02))),
    (" **", 0.52, ((" about four times", 0.22), (" more than four", 0.14), (" 4.4 times as much", 0.08))),
    ("4", 0.93, (("four times**", 0.04), ("much more**", 0.01))),
    (".", 0.97, ((" times**", 0.02),)),
    ("4", 0.9, (("3 times**", 0.06), ("5 times**", 0.02))),
    (" times", 0.88, (("** times as", 0.07), ("×** as much", 0.03))),
    ("**", 0.79, ((" more**,", 0.1), (" as much** on its", 0.08))),
    (" as", 0.71, ((" more of its light", 0.16), (" the light", 0.06), (", and", 0.03))),
    (" much", 0.94, ((" many photons on", 0.02), (" strongly", 0.02))),
)
_LAST = ((".", 0.41), (" of its light", 0.2), (" energy per metre", 0.12), (" in the air", 0.07), (",", 0.05))
_BONUS = " on"  # what the draft did not propose
_GOES_ON = 0.6  # probability of each further token of a guess beside the path


def passes() -> list[PassStats]:
    """Passes of a model much larger than memory: thirteen seconds each, and most of that the link's."""
    return [
        PassStats(
            index=index,
            tree_nodes=768,
            tree_depth=24,
            draft_steps=20,
            emitted=emitted,
            draft_seconds=0.52,
            target_seconds=12.9,
            bytes_streamed=85_600_000_000,
            wait_seconds=10.7,
            compute_seconds=2.1,
        )
        for index, emitted in enumerate(_EMITTED, 1)
    ]


def tree(index: int) -> TreeSeen:
    """The tree of a pass in the second answer."""
    parent, text, probability, accepted = [-1], [" strength,"], [1.0], [0]

    def add(above: int, token: str, share: float) -> int:
        parent.append(above)
        text.append(token)
        probability.append(probability[above] * share)
        return len(parent) - 1

    def reject(guesses: tuple[tuple[str, float], ...]) -> None:
        for guess, chance in guesses:
            node = accepted[-1]
            for place, word in enumerate(_words(guess)):
                node = add(node, word, _GOES_ON if place else chance)

    for token, share, beside in _STEPS:
        reject(beside)
        accepted.append(add(accepted[-1], token, share))
    reject(_LAST)
    return TreeSeen(index, tuple(parent), tuple(text), tuple(probability), tuple(accepted), _BONUS)


def _words(guess: str) -> list[str]:
    """Tokens of a guess: each word with the space before it."""
    first, *others = guess.split(" ")
    words = [first, *(f" {word}" for word in others)]
    return words if first else words[1:]
