"""Options of `torch.compile(model, backend="cupyops", options={...}, mode=...)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .._util.near import meant
from ..errors import InputError

MODES = (None, "default", "reduce-overhead")


@dataclass(frozen=True)
class Options:
    """Options of the backend.

    Attributes:
        cudagraphs: run each graph as CUDA graphs, by PyTorch's own cudagraph trees; `mode="reduce-overhead"` says the same.
        exact: round float16 and bfloat16 after each operator and contract no multiplication with an addition, as eager
            does. By default values stay float32 between the operators that share a kernel.
    """

    cudagraphs: bool = False
    exact: bool = False

    @classmethod
    def of(cls, mode: str | None, options: Mapping[str, Any] | None) -> Options:
        """Read the keywords that torch.compile hands to a backend.

        Raises:
            InputError: an option or mode that there is not, or a value of the wrong type.
        """
        if mode not in MODES:
            raise InputError(
                f'torch.compile(backend="cupyops"): mode is {mode!r}, expected "default" or "reduce-overhead"; the others '
                "choose among Triton's templates"
            )
        known = [field.name for field in fields(cls)]
        given = dict(options or {})
        for name, value in given.items():
            if name not in known:
                raise InputError(
                    f'torch.compile(backend="cupyops"): there is no option {name!r}; there are '
                    f"{', '.join(known)}{meant(str(name), known)}"
                )
            if not isinstance(value, bool):
                raise InputError(
                    f'torch.compile(backend="cupyops"): options[{name!r}] is {value!r}, expected True or False'
                )
        if mode == "reduce-overhead":
            given.setdefault("cudagraphs", True)
        return cls(**given)
