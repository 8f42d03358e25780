"""Calibration text of many kinds, and measurement of a layer's inputs on it.

Quantization to few bits is much more accurate if it is known which inputs are large. A few hundred tokens are
enough. The text is fixed, so that a self-draft is the same for every user and prompt.
"""

from typing import Any

import torch

TEXT = """\
The history of science is the story of how people learned to ask better questions. In 1687 Isaac Newton \
showed that one law governs the fall of an apple and the path of the Moon; two hundred years later, Marie \
Curie weighed tons of ore to find a tenth of a gram of radium. What did they have in common? Patience.

def mean(values: list[float]) -> float:
    \"\"\"Return the average, or 0.0 for an empty list.\"\"\"
    return sum(values) / len(values) if values else 0.0

Dear Anna,
Thank you for your letter. We are all well here, although it has rained since Monday and the children are \
bored. Could you bring the blue suitcase when you come on the 14th? With love, Peter

1. Heat two spoons of oil in a pan.
2. Add the onion and cook it slowly for ten minutes.
3. Stir in the rice, then 500 ml of hot stock.

"Who is there?" she whispered. Nobody answered. The old house creaked, as it always did before a storm, \
and far below her a door closed by itself.

User: What is the difference between weather and climate?
Assistant: Weather is what happens in the air today or this week. Climate is the average of the weather \
over many years. For example, a cold day in July does not mean that the climate is getting colder.

Sales rose by 12% in the third quarter, to $4.6 million, while costs stayed flat. SELECT name, SUM(price) \
FROM orders WHERE year = 2021 GROUP BY name ORDER BY 2 DESC LIMIT 5;
"""


class InputMoments:
    """Mean square of every input feature of the matrices in a module, gathered while it runs."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._hooks = [
            child.register_forward_pre_hook(self._watch(name + ".weight" if name else "weight"))
            for name, child in module.named_modules()
            if isinstance(getattr(child, "weight", None), torch.Tensor) and child.weight.dim() == 2
        ]

    def _watch(self, name: str) -> Any:
        def gather(module: Any, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
                squares = args[0].detach().float().square().reshape(-1, args[0].shape[-1]).sum(0)
                self._sums[name] = self._sums[name] + squares if name in self._sums else squares

        return gather

    def importance(self, name: str, weight: torch.Tensor) -> torch.Tensor | None:
        """Return the importance of each input of a matrix, in a shape that broadcasts to that of `weight`.

        A linear layer has its inputs along the last dimension, GPT-2's Conv1D along the first. The result is
        None for a matrix without observed inputs.
        """
        sums = self._sums.get(name)
        if sums is None or weight.dim() != 2:
            return None
        if weight.shape[1] == len(sums):
            return sums[None, :]
        return sums[:, None] if weight.shape[0] == len(sums) else None

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
