"""Hugging Face's transformers: the attention by name, and a `Trainer`'s callback.

`cupyops.swap(model)` needs none of it: it finds models of transformers by itself.
"""

from __future__ import annotations

from typing import Any

from ..nn._swap import Swap, swap
from ..nn._swap.tables import ATTENTION, register

__all__ = ["ATTENTION", "callback", "register"]


def callback(**options: Any) -> Any:
    """A callback that has a `Trainer`'s model run operators of cupyops while it trains: `Trainer(callbacks=[callback()])`.

    Args:
        options: `only`, `skip`, `exact` and `keep_logits`, as of `cupyops.swap`.

    Returns:
        transformers.TrainerCallback: it swaps the model when training begins and undoes it when it ends; `.swap` is what
        was done.

    Raises:
        ModuleNotFoundError: transformers is not installed.

    Example:
        >>> callback = cupyops.integrations.transformers.callback(skip=torch.nn.Linear)
    """
    from transformers import TrainerCallback  # type: ignore[import-not-found]

    class Swapped(TrainerCallback):  # type: ignore[misc]
        swap: Swap | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
            self.swap = swap(model, **options)

        def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if self.swap is not None:
                self.swap.undo()

    return Swapped()
