"""Steps of a program: calls that stay PyTorch's, and groups of stores that become one kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .values import Buffer, Store, Unit, leaves, tensors, viewed

if TYPE_CHECKING:
    from .render import Bundle, Rendered, SideBySide
    from .trace import Trace


class Call(Unit):
    """A call of the graph as it is. `outputs`: path in the result -> buffer, or name of what is no tensor.

    `serial`: it draws random numbers or acts on something besides its results, so such calls keep their order.
    `target`: the input of the graph that it overwrites.
    """

    def __init__(
        self, node: Any, order: int, args: Any, kwargs: dict[str, Any], *, serial: bool, target: Buffer | None = None
    ) -> None:
        super().__init__(order)
        self.node, self.args, self.kwargs, self.serial, self.target = node, args, kwargs, serial, target
        self.outputs: dict[tuple[int, ...], Buffer | str] = {}

    def leaves(self) -> Iterator[Buffer | Store]:
        """The buffers and stores whose memory its arguments show."""
        for one in tensors((self.args, self.kwargs)):
            yield from leaves(viewed(one))


class Group(Unit):
    """Stores that one kernel computes."""

    def __init__(self, order: int) -> None:
        super().__init__(order)
        self.stores: list[Store] = []
        self.reads: set[str] = set()  # names of buffers
        self.trace: Trace | None = None
        self.kernel: Rendered | Bundle | SideBySide | None = None
