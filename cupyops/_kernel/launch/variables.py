"""`kernel.globals()`: the `__device__` and `__constant__` variables that a kernel sees, read and set from Python."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ...errors import InputError
from .executors import default_device, executors
from .specialised import Specialised
from .symbols import Symbol


class Holder(Protocol):
    """Memory of the variables of one instance of a kernel."""

    def read(self, symbol: str, size: int) -> Tensor:
        """The bytes, as a new tensor of uint8."""

    def write(self, symbol: str, content: Tensor) -> None:
        """Set all bytes."""


class Variable:
    """One variable of a kernel, on one device.

    Attributes:
        name: as C++ has it: `scale`, `ns::scale`.
        dtype: of the elements; `torch.uint8`, its bytes, where it is a struct.
        shape: of the array; () for a single value.
    """

    def __init__(self, label: str, symbol: Symbol, holder: Holder) -> None:
        self.name, self.dtype, self.shape = symbol.name, symbol.dtype, symbol.shape
        self._label, self._symbol, self._holder = label, symbol, holder

    def get(self) -> Tensor:
        """The value: a copy on its device, made on the current stream, so after the launches that were made there."""
        return self._holder.read(self._symbol.symbol, self._symbol.size).view(self.dtype).reshape(self.shape)

    def set(self, value: Any) -> None:
        """Set the value, on the current stream: launches made there later see it.

        Args:
            value: a tensor on any device, a NumPy array, a number or a list, which broadcasts to the variable's shape; for
                a struct a NumPy structured array or its bytes.

        Raises:
            InputError: another shape or dtype, a number that does not fit, or the variable is `const`.
        """
        if self._symbol.constant:
            raise InputError(
                f"{self._label} is const: its value is part of the code. Leave out const, or set it in the text"
            )
        if isinstance(value, (bytes, np.void)) or (isinstance(value, np.ndarray) and value.dtype.names is not None):
            content = self._of_bytes(value if isinstance(value, bytes) else value.tobytes())
        else:
            tensor = self._as_tensor(value)
            try:
                tensor = tensor.broadcast_to(self.shape)
            except RuntimeError:
                raise self._refused(f"shape {tuple(tensor.shape)}") from None
            content = tensor.contiguous().reshape(-1).view(torch.uint8)
        self._holder.write(self._symbol.symbol, content)

    def _of_bytes(self, value: bytes) -> Tensor:
        if len(value) != self._symbol.size:
            raise self._refused(f"{len(value)} bytes (a NumPy dtype of fields needs align=True)")
        return torch.frombuffer(bytearray(value), dtype=torch.uint8)

    def _as_tensor(self, value: Any) -> Tensor:
        """The value in the variable's dtype, which must hold it."""
        if isinstance(value, Tensor) and value.device.type != "cpu":
            if value.dtype is not self.dtype:
                raise self._refused(f"a tensor of {value.dtype}")
            return value.detach()
        try:
            if isinstance(value, (Tensor, np.ndarray, np.generic)):
                given = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value)
                converted = given.to(self.dtype)
            else:
                given = torch.tensor(value, dtype=torch.float64)
                converted = torch.tensor(value, dtype=self.dtype)  # refuses an integer out of range
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise self._refused(f"{value!r} ({error})") from None
        exact = self.dtype.is_floating_point or given.dtype is self.dtype
        if not exact and not torch.equal(converted.to(given.dtype), given):
            raise self._refused(f"{value!r}, which does not fit")
        return converted

    def _refused(self, found: str) -> InputError:
        return InputError(
            f"{self._label} takes {self.dtype} of shape {self.shape}, {self._symbol.size} bytes in all; got {found}; "
            "give such an array"
        )

    def __repr__(self) -> str:
        return f"Variable({self.name}: {self.dtype}, shape {self.shape})"


class Globals(Mapping[str, Variable]):
    """The variables of one instance of a kernel on one device, by name."""

    def __init__(self, specialised: Specialised, device: torch.device | None) -> None:
        self._label = specialised.name
        self.device = device or default_device()
        symbols, holder = _symbols_and_holder(specialised, self.device)
        self._variables = {name: Variable(f"{specialised.name}: {name}", one, holder) for name, one in symbols.items()}

    def __getitem__(self, name: str) -> Variable:
        try:
            return self._variables[name]
        except KeyError:
            there = ", ".join(self._variables) or "none"
            raise InputError(
                f"{self._label} has no __device__ or __constant__ variable {name!r}; it has {there}"
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._variables

    def __iter__(self) -> Iterator[str]:
        return iter(self._variables)

    def __len__(self) -> int:
        return len(self._variables)

    def __repr__(self) -> str:
        return f"Globals({self._label} on {self.device}: {', '.join(self._variables) or 'none'})"


def _symbols_and_holder(specialised: Specialised, device: torch.device) -> tuple[dict[str, Symbol], Holder]:
    if device.type == "cuda" and torch.cuda.is_available():
        loaded = specialised.on(torch.cuda.current_device() if device.index is None else device.index)
        if (copied := specialised.copied(loaded.binary)) and specialised.shared is not None:
            specialised.shared.bring(loaded.device, loaded.module, loaded, copied)
        return specialised.symbols(loaded.binary), loaded
    variables = getattr(executors.get(device.type), "variables", None)
    if variables is None:
        raise specialised.nowhere(device)
    binary, holder = variables(specialised)
    return specialised.symbols(binary), holder
