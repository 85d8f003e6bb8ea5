"""A kernel with its template values chosen, and where it runs: on a CUDA device, or by another executor."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._util import torch_private, tracing
from ..._util.near import meant
from ...errors import CompileError, CupyopsError, LaunchError
from ..compile import architecture, compiler, declarations, source
from ..compile.binary import Binary
from . import signature
from .configuration import Configuration
from .ctype import DTYPES, VARIABLE_DTYPES, WrongDtype, c_token
from .executors import default_device, executors
from .loaded import Loaded
from .pointers import Pointers, held
from .shared import Shared
from .symbols import Symbol, symbols

_NOTHING = (
    "a kernel without a pointer parameter, a tensor map or a struct of pointers has nothing to work on; give it one"
)


class Specialised:
    """One instance of a kernel, as its text was then; loaded on each device at the first launch there.

    Raises:
        InputError: the text has no such kernel, and nothing that could make it.
    """

    def __init__(
        self,
        text: source.Source,
        base: str,
        name: str,
        types: dict[str, Any],
        options: tuple[str, ...],
        arch: str | None = None,
        strided: bool = False,
        extension: bool = False,
        shared: Shared | None = None,
    ) -> None:
        self.source, self.base, self.name, self.options, self.arch = text, base, name, options, arch
        self._copied: dict[str, Symbol] | None = None
        self.shared = shared  # the variables of its text, where kernels have them together
        self.strided = strided  # whether it may touch what lies between the elements of views
        self.values = tuple(types.values())
        self._tokens = {parameter: c_token(value, extension) for parameter, value in types.items()}
        self.loaded: dict[int, Loaded] = {}
        self._lock = threading.Lock()
        said = declarations.told(text, base)
        # what the text has of the parameters, until it is compiled; None where it cannot be read
        self.declared = None if said is None else declarations.readable(said)
        pointers = (index for index, (ctype, _) in enumerate(self.declared or ()) if ctype.endswith("*"))
        self._first = next(pointers, None)

    def anchored(self, args: Sequence[Any]) -> Any:
        """The tensor whose device and stream a launch goes to: the first pointer's, else that of the first tensor map.

        Where the text alone is known, which may have typedefs of pointers, a tensor before that pointer is one too.
        """
        known = args if self._first is None else args[: self._first + 1]
        first: Any = next((value for value in known if isinstance(value, Tensor)), None)
        if first is None and self._first is not None and len(args) > self._first:
            first = args[self._first]
        if isinstance(first, Pointers):
            first = first.tensors[0]
        return first if first is not None else next((one for value in args for one in held(value)), None)

    def placed(self, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments in the order of the kernel's parameters, some of which are given by name.

        Raises:
            LaunchError: a name that no parameter has, one that is given twice, one that is missing, or the names are not in
                the text.
        """
        if self.declared is None:
            raise LaunchError(
                f"{self.name}: {', '.join(named)} is given by name, but the text makes the parameters with macros and does "
                "not tell their names; give the arguments in order"
            )
        names = [name for _, name in self.declared]
        expected = ", ".join(f"{ctype} {name}" for ctype, name in self.declared)
        for name in named:
            if name not in names:
                raise LaunchError(
                    f"{self.name}: no parameter and no template parameter {name}, expected one of ({expected})"
                    f"{meant(name, names) or self._unnamed_template(name)}"
                )
            if name in names[: len(args)]:
                raise LaunchError(
                    f"{self.name}: {name} is given twice, in order and by name; give it once: ({expected})"
                )
        if missing := [name for name in names[len(args) :] if name not in named]:
            raise LaunchError(f"{self.name}: {', '.join(missing)} is not given, expected ({expected})")
        return (*args, *(named[name] for name in names[len(args) :]))

    def _unnamed_template(self, name: str) -> str:
        """Return how to make the Kernel, if `name` is a template parameter that its name leaves out; else an empty text."""
        template = [one.name for one in declarations.function(self.source, self.base).template]
        return f'; the kernel is a template: Kernel(code, "{self.base}<{", ".join(template)}>")' * (name in template)

    def refuse_dtypes(self, args: Sequence[Any]) -> None:
        """Raise `WrongDtype` for tensors that the text alone tells that the kernel does not take: of a dry run."""
        for (ctype, name), value in zip(self.declared or (), args):
            if isinstance(value, Tensor) and ctype.endswith("*"):
                pointee = signature.unqualified(ctype)
                dtype = DTYPES.get(self._tokens.get(pointee, pointee))
                if dtype not in (None, value.dtype):
                    message = f"{self.name}: parameter `{ctype} {name}` got a tensor of {value.dtype}, expected {dtype}"
                    raise WrongDtype(message, value.dtype)

    def binary(self, arch: str) -> Binary:
        """Compile, or find, this kernel for a device of `arch`. Raises `LaunchError` where it is for others alone."""
        target = architecture.target(self.arch, arch)
        if target is None:
            raise LaunchError(
                f"{self.name}: the kernel is for {self.arch} alone, which does not run on {arch}; launch it on such a "
                f'device, or inside cupyops.simulate("{self.arch}")'
            )
        return compiler.build(self.source, self.name, target, self.options)

    def arguments(self, binary: Binary) -> tuple[signature.Argument, ...]:
        """Arguments that the kernel takes."""
        declared = declarations.parameters(self.source, self.base, binary)
        found = signature.join(self.name, declared, binary.parameters, self._tokens, binary.types)
        if all(one.kind not in ("pointer", "struct") for one in found) and not self.symbols(binary):
            raise CompileError(f"{self.name}: {_NOTHING}")
        return found

    def symbols(self, binary: Binary) -> dict[str, Symbol]:
        """The `__device__` and `__constant__` variables of the file, by name."""
        return symbols(binary.ptx, self.source)

    def copied(self, binary: Binary) -> dict[str, Symbol]:
        """The variables of its text that a launch may have to copy to where this kernel sees them."""
        if self.shared is None or not self.shared.moves(self.source):
            return {}
        if self._copied is None:
            found = self.symbols(binary)
            self._copied = {name: one for name, one in found.items() if one.is_state}
        return self._copied

    def launch(
        self, anchor: Any, configuration: Configuration, args: tuple[Any, ...], record: tracing.Record | None = None
    ) -> Loaded | None:
        """Launch where the tensor `anchor` is; on a GPU, give the kernel as it is loaded there."""
        if isinstance(anchor, Tensor):
            device, index, is_cuda = anchor.device, anchor.get_device(), anchor.is_cuda
        elif self._takes_structs_alone(args):
            device = default_device()
            is_cuda = device.type == "cuda" and torch.cuda.is_available()
            index = torch.cuda.current_device() if is_cuda else -1
        else:
            raise self._without_a_tensor(anchor, args)
        if is_cuda:
            loaded = self.on(index)
            if (copied := self.copied(loaded.binary)) and self.shared is not None:
                self.shared.bring(index, loaded.module, loaded, copied)
            loaded.launch(configuration, args, record)
            return loaded
        if (execute := executors.get(device.type)) is not None:
            report = execute(self, index, configuration, args)
            if record is not None and report is not None:
                record.simulated(report)
        elif device.type != "meta":
            raise self.nowhere(device)
        return None

    def _takes_structs_alone(self, args: Sequence[Any]) -> bool:
        """Return True if memory comes only as addresses in structs, or as variables, beside which numbers tell no device."""
        structs = any(isinstance(value, (np.ndarray, np.void)) for value in args)
        numbers = self.declared is not None and all(self._is_number(ctype) for ctype, _ in self.declared)
        return self._first is None and (structs or numbers)

    def _without_a_tensor(self, anchor: Any, args: tuple[Any, ...]) -> CupyopsError:
        if self.declared is None:
            return LaunchError(f"{self.name}: no argument is a tensor; the first pointer of a kernel must be one")
        signature.check_count(self.name, self.declared, args)
        if self._first is None:
            return LaunchError(
                f"{self.name}: no argument tells of memory, and there is no pointer; give a tensor map, "
                "cupyops.pointers([...]), or a NumPy structured scalar with cupyops.address(x) in it"
            )
        name = self.declared[self._first][1]
        found = f"{signature.shown(anchor)}; the first pointer of a kernel must be a tensor"
        if isinstance(anchor, int):
            found += f": give {name} itself, not {name}.data_ptr(), or an address with a tensor before it"
        return LaunchError(f"{self.name}: {name} is {found}{signature.tensor_of(anchor, name)}")

    def _is_number(self, ctype: str) -> bool:
        bare = ctype.removeprefix("const ").removesuffix(" const")
        return bare in VARIABLE_DTYPES or bare in self._tokens

    def nowhere(self, device: torch.device) -> LaunchError:
        """The error of a device on which no kernel runs."""
        return LaunchError(
            f"{self.name}: no way to run a kernel on {device}; the tensors must be on a CUDA GPU, or on the CPU "
            "inside cupyops.simulate()"
        )

    def on(self, device: int) -> Loaded:
        """Return the kernel loaded on CUDA device `device`; load it at the first call."""
        if torch_private.is_forked_after_cuda():
            raise LaunchError(
                f"{self.name}: this process was forked from one that had used CUDA, which does not survive that; start "
                'it with the method "spawn" or "forkserver" of multiprocessing'
            )
        with self._lock:
            if device not in self.loaded:
                major, minor = torch.cuda.get_device_capability(device)
                binary = self.binary(f"sm_{major}{minor}")
                alone = bool(self.symbols(binary))
                self.loaded[device] = Loaded(self.name, binary, self.arguments(binary), device, alone, self.shared)
            return self.loaded[device]
