"""A CUDA kernel as a Python object: specialise, check, launch.

    scale = Kernel("scale.cu", "scale<T>")
    scale[ceil_div(n, 256), 256](x, y, 0.5, n, T=x.dtype)

The first call with given template values compiles (or finds) the kernel and loads it on the tensors' device; later calls
cost a few dictionary lookups and the launch. Every argument is checked before anything is launched.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._util import by_need, callers, observed, torch_private, tracing
from .._util.by_name import ByName
from .._util.strides import has_bits, is_dry
from ..errors import CupyopsError, LaunchError
from .compile import architecture, compiler, source
from .compile.declarations import function, refuse_unknown
from .extension import text as extension_text
from .graph import capturing
from .launch import driver, fastpath, faults, reload
from .launch.configuration import Configuration
from .launch.configuration import ceil_div as ceil_div
from .launch.configuration import grid_1d as grid_1d
from .launch.ctype import FLOATING as FLOATING  # what kernels of this package declare for T
from .launch.ctype import HALF as HALF
from .launch.ctype import INTEGRAL as INTEGRAL
from .launch.ctype import WrongDtype as WrongDtype
from .launch.executors import addressing as addressing
from .launch.executors import asked
from .launch.executors import capability as capability
from .launch.executors import executors as executors
from .launch.loaded import Loaded
from .launch.pointers import held
from .launch.shared import Shared
from .launch.specialised import Specialised
from .launch.template import Template
from .launch.variables import Globals
from .launch.versions import refusing_writes, this_thread

_MAX_CONFIGURED = 4096  # grids remembered per kernel
_OF_THIS_PROCESS = {
    "source",
    "shared",
    "_specialised",
    "_configured",
    "_fast",
    "_boundaries",
    "_watch",
    "_table",
    "_lock",
}
_kernels: list[weakref.ref[Kernel]] = []


def kernels(folder: Path | None = None) -> list[Kernel]:
    """Every `Kernel` alive in this process, in order of creation; with `folder`, those of the .cu files in it."""
    if folder is not None:
        by_need.load()
    alive = [kernel for reference in _kernels if (kernel := reference()) is not None]
    if folder is None:
        return alive
    return [kernel for kernel in alive if not kernel.is_text and getattr(kernel.source.path, "parent", None) == folder]


def _after_fork() -> None:
    """Reset a child process: nobody will release a lock that another thread held, and nothing is loaded on a device."""
    for kernel in kernels():
        kernel._lock = threading.Lock()
        kernel._table.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Kernel(ByName, Template):
    """A `__global__` function of a .cu file or of a piece of CUDA C.

    Args:
        code: name of a .cu file, looked for beside the calling module, in the working folder and among the built-in
            kernels; or CUDA C itself. In an interactive session (or with `CUPYOPS_RELOAD=1`) an edited file is read again
            at the next `kernel[...]`.
        name: the function, with its template parameters if it has any, `"layer_norm_fwd<T, VEC>"`, and its namespace if it
            has one, `"ns::f"`. A parameter may have its value there, as C++ writes it: `"f<float, 4>"`, `"f<T, ::Add>"`.
        options: further NVRTC options, such as `("--use_fast_math",)` or `("-Iheaders",)`.
        define: constants that the text uses and Python decides, by name: `{"BLOCK": 256}` is `#define BLOCK 256`.
        arch: a specific target, for what one architecture alone has, such as wgmma: compiled for `"sm_90a"` the kernel runs
            on compute capability 9.0 alone, for `"sm_100f"` on 10.0 and later minors. By default it is compiled for the
            device that it is launched on.
        **domain: for each template parameter the values that it takes, as a tuple: what ahead-of-time compilation
            builds, and what a launch may ask for. A parameter not named here takes any dtype, bool, int, or name of a
            type of the source, such as `Op="Add"`.
        where: a function of template parameters, of those that it names, that says whether a combination of values exists.

        strided: the kernel is told the strides of its tensors, or knows what lies between their elements. Others are to be
            given contiguous tensors: a kernel gets an address and nothing more, and would read a view as its memory lies.
            With `CUPYOPS_DEBUG=1` a launch with a view warns, and in the simulator it is an error to touch what lies
            between the elements of one; neither is so with `strided=True`.
        extension: the file is one of a C++ extension of PyTorch, taken as it is: see `cupyops.extension`.

    `kernel[grid, block](*args, T=torch.float32)` launches on PyTorch's current stream of the tensors' device, or of the
    current GPU where structs with `cupyops.address(x)` in them are all that it takes. No gradient flows back through a
    launch, which warns of that once where a tensor requires one; `cupyops.operator` makes what has a gradient. `grid` and
    `block` are ints or tuples; `kernel[grid, block, shared]` adds bytes of dynamic shared memory, and `configure` takes
    clusters and cooperative launches too. A grid with a zero in it launches nothing. Tensors go to pointers, None to a null
    pointer, Python numbers to exactly the C type declared, a NumPy array or structured scalar of the right size to a struct
    by value, a `tensor_map` to a struct of 128 bytes.

    Raises:
        LaunchError: wrong count, dtype, device, alignment or range of an argument, a launch that CUDA refuses, or a device
            that cannot run `arch`.
        CompileError: the kernel does not compile.
        SourceError: there is no such file, when the Kernel is made.
        InputError: the text has no such kernel, when the Kernel is made.

    Example:
        >>> code = "__global__ void twice(float* x, int n) { int i = threadIdx.x; if (i < n) x[i] *= 2; }"
        >>> twice, x = cupyops.Kernel(code, "twice"), torch.tensor([1.0, 2.0])
        >>> with cupyops.simulate():  # on a GPU: tensors there, and no simulate()
        ...     twice[1, 32](x, x.numel())
        >>> x
        tensor([2., 4.])
    """

    def __init__(
        self,
        code: str | Path,
        name: str,
        *,
        options: Iterable[str] = (),
        define: Mapping[str, int] | None = None,
        arch: str | None = None,
        where: Callable[..., bool] | None = None,
        strided: bool = False,
        extension: bool = False,
        **domain: tuple[Any, ...],
    ) -> None:
        self._code, self.extension = code, extension
        self._beside, self._defined_in = caller()
        super().__init__(name, domain, where)
        is_named = isinstance(code, (str, os.PathLike))  # else reading it says what it is not
        if is_named and not (extension or source.is_own(self._beside)):  # ours are read later
            refuse_unknown(code, self.base, self._beside)
        self.options = (*compiler.checked_options(options), *compiler.defines(define or {}))
        if extension:
            self.options += extension_text.OPTIONS
        self.arch = architecture.checked_specific(arch)
        self.strided = strided or source.is_own(self._beside)  # ours are told, and read past rows
        self.shared: Shared | None = None
        self._begin()

    def _begin(self) -> None:
        """Reset to the state in which nothing is compiled, loaded or configured, and nobody has been warned."""
        self._warned: set[int] = set()  # the places of arguments that were views
        self._warned_of_gradients = False
        self._specialised: dict[tuple[Any, ...], Specialised] = {}
        self._configured: dict[tuple[Any, ...], Callable[..., None]] = {}
        self._fast: fastpath.Configure | None = None  # written at the first load, when the PTX has told the types
        self._boundaries: tuple[tuple[str, int], ...] = ()  # which it checks
        self._watch: reload.Watch | None = None
        self._table: dict[Any, tuple[Any, ...]] = {}  # for the fast path, of the device used last
        self._lock = threading.Lock()
        _kernels.append(weakref.ref(self))

    def defined_at(self, beside: Path | None, module: str, strided: bool) -> None:
        """Assign the kernel to a module that asked for it through another, and look for includes beside that one."""
        self._beside, self._defined_in, self.strided = beside, module, strided or source.is_own(beside)

    @functools.cached_property
    def source(self) -> source.Source:
        """The text, read at first use."""
        if self.extension:
            return extension_text.load(self._code, self._beside, self.options).source
        return source.load(self._code, self._beside)

    @property
    def declared(self) -> list[tuple[str, str]]:
        """(C type, name) of each parameter, from the text.

        Raises:
            InputError: the text does not tell, because it makes the kernel or its parameters with macros.
        """
        return function(self.source, self.base).parameters

    @property
    def file(self) -> str | None:
        """The name of its .cu file, without folders; None where it was given as CUDA C."""
        return None if self.is_text else Path(self._code).name

    @property
    def is_text(self) -> bool:
        """True if the kernel was given as CUDA C, and not as the name of a file."""
        return isinstance(self._code, str) and source.is_text(self._code)

    def __getitem__(self, launch: tuple[Any, ...]) -> Callable[..., None]:
        try:
            return self._configured[launch]
        except KeyError:
            if not isinstance(launch, tuple) or not 2 <= len(launch) <= 3:
                raise LaunchError(
                    f"{self}: launch with kernel[grid, block] or kernel[grid, block, shared], got {launch!r}"
                ) from None
            return self._configure(launch, launch)
        except TypeError:  # no hash: symbolic sizes, as a dry run has them
            return self._unhurried(launch)

    def __call__(self, *args: Any, **template: Any) -> NoReturn:
        """Refused: a launch needs a grid and a block."""
        raise LaunchError(
            f"{self}: launch with kernel[grid, block](...); grid and block are how many blocks and threads. Called as "
            "CuPy's, f(grid, block, args), is cupyops.RawKernel"
        )

    def configure(
        self,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        *,
        shared: int = 0,
        cooperative: bool = False,
        cluster: int | tuple[int, ...] | None = None,
        overlap: bool = False,
    ) -> Callable[..., None]:
        """Return a function of the kernel's arguments, like `kernel[grid, block, shared]`, with more to choose.

        Args:
            grid: how many blocks: an int, or a tuple of one to three.
            block: how many threads each has: an int, or a tuple of one to three.
            shared: bytes of dynamic shared memory for each block.
            cooperative: launch all blocks at once or none, so that they may wait for each other.
            cluster: how many blocks form a cluster, of which the grid is to be a multiple; at most 8, on compute
                capability 9.0 and later.
            overlap: blocks may begin while the kernel launched before on the stream ends (CUDA's programmatic dependent
                launch), which hides the start of the launch. The kernel is to wait for it, `griddepcontrol.wait`, before
                it reads or writes memory. Before compute capability 9.0 a launch like any other.

        Returns:
            A function that launches: call it with the kernel's arguments.

        Raises:
            LaunchError: no CUDA GPU can launch that; when called: this device cannot, or the arguments are wrong.

        Example:
            >>> code = "__global__ void first(float* x) { if (threadIdx.x == 0) x[blockIdx.x] = blockIdx.x; }"
            >>> first, x = cupyops.Kernel(code, "first"), torch.zeros(4)
            >>> with cupyops.simulate("sm_90"):
            ...     first.configure(4, 32, cluster=2)(x)
            >>> x
            tensor([0., 1., 2., 3.])
        """
        key = (overlap, cooperative, cluster, grid, block, shared)  # what nobody writes in brackets
        try:
            return self._configured[key]
        except KeyError:
            return self._configure(key, (grid, block, shared, cooperative, cluster, overlap))
        except TypeError:
            return self._unhurried((grid, block, shared, cooperative, cluster, overlap))

    @torch_private.outside_of_graphs
    def _configure(self, key: tuple[Any, ...], launch: tuple[Any, ...]) -> Callable[..., None]:
        """The launch function; kept for the next time under `key`, but where an edited file is to be noticed."""
        if not this_thread.in_role:
            self._refuse_to_be_recorded()
        watching = reload.wanted()
        if watching:
            self._reload()
        configuration = self._configuration(launch)
        if 0 in configuration.grid:  # looked at in full, this once
            now, later = self._unhurried(configuration), _nothing
        elif (fast := self._fast) is None:
            return self._unhurried_at_first(configuration)
        else:
            now = later = fast(configuration, driver.launcher(configuration))
        if not watching:
            if len(self._configured) >= _MAX_CONFIGURED:
                self._configured.clear()
            self._configured[key] = later
        return now

    def _refuse_to_be_recorded(self) -> None:
        """Raise where a graph of PyTorch's operators is recorded, which would lose the launch."""
        if torch_private.is_jit_tracing():
            raise LaunchError(
                f"{self}: torch.jit.trace and torch.onnx.export(dynamo=False) record what PyTorch's operators do, and would "
                "lose this launch; make it an operator with cupyops.operator, of which they record the reference"
            )
        if torch_private.proxy_mode():
            raise LaunchError(
                f"{self}: make_fx, torch.export and torch.compile record what PyTorch's operators do, and would lose this "
                "launch; make it an operator with cupyops.operator, which they record"
            )

    def _refuse_tracers(self, args: tuple[Any, ...]) -> None:
        """Raise for tensors without memory of their own, whose results somebody would take for those of the launch."""
        for value in (one for each in args for one in held(each)):
            if what := torch_private.stands_for(value):
                raise LaunchError(
                    f"{self}: got {what}, which has no memory for a kernel to work on; make it an operator with "
                    "cupyops.operator, which torch.export, torch.compile, make_fx and torch.func can call"
                )
            if torch_private.has_tangent(value):
                raise LaunchError(
                    f"{self}: got a tensor with a tangent of forward-mode AD, which would end here without a word; "
                    "make it an operator with cupyops.operator, whose reference has a derivative, or give .detach()"
                )

    def _refuse_addresses_of_nothing(self) -> None:
        """Raise where a struct has the addresses of tensors without memory; a role is dry there."""
        if not this_thread.in_role:
            raise LaunchError(
                f"{self}: got a struct with the address of a tensor that has no memory for a kernel to work on; make it an "
                "operator with cupyops.operator, which torch.export, torch.compile, make_fx and torch.func can call"
            )

    def _configuration(self, launch: tuple[Any, ...]) -> Configuration:
        try:
            return Configuration.of(*launch)
        except LaunchError as error:
            raise LaunchError(f"{self}: {error}") from None

    def _unhurried(self, launch: Configuration | tuple[Any, ...]) -> Callable[..., None]:
        return lambda *args, **template: self._launch(launch, args, template)

    def _unhurried_at_first(self, configuration: Configuration) -> Callable[..., None]:
        """Return a launch function that may be kept from before the kernel's first launch, after which it is a fast one."""
        fast: Callable[..., None] | None = None

        def launch(*args: Any, **template: Any) -> None:
            nonlocal fast
            if fast is not None:
                fast(*args, **template)
                return
            self._launch(configuration, args, template)
            if self._fast is not None:
                fast = self._fast(configuration, driver.launcher(configuration))

        return launch

    @torch_private.outside_of_graphs
    def _launch(self, launch: Configuration | tuple[Any, ...], args: tuple[Any, ...], template: dict[str, Any]) -> None:
        """A launch in full: the first on a device, one being traced, one by another executor, or none on a dry run.

        `template` also has the arguments that are given by their names in the kernel.
        """
        named = {name: template.pop(name) for name in list(template) if name not in self.template}
        given = (*args, *named.values())
        if not this_thread.in_role:
            self._refuse_to_be_recorded()
            self._refuse_tracers(given)
            self._warn_of_gradients(given)
        elif any(is_dry(one) for value in given for one in held(value)):
            self._run_dry(args, named, template)
            return
        specialised = self.instance(**template)
        args = specialised.placed(args, named) if named else args
        anchor = specialised.anchored(args)
        if anchor is None and asked.of_nothing:
            self._refuse_addresses_of_nothing()
            return
        configuration = launch if isinstance(launch, Configuration) else self._configuration(launch)
        if faults.debug and not self.strided:
            self._warn_of_views(specialised, args)
        if 0 in configuration.grid:
            return
        recorder = observed.recorder()
        looked_at = this_thread.left_alone and not capturing()
        watched = refusing_writes(specialised.name, specialised.declared or (), args) if looked_at else nullcontext()
        with observed.unseen(), watched:
            loaded = self._launched(specialised, anchor, configuration, args)
        if recorder is not None:
            if any(isinstance(one, Tensor) and has_bits(one) for one in args):
                recorder.refuse(f"{specialised.name} was given a copy of a conjugated or negated view")
            recorder.launched(specialised, loaded, configuration, args)
        copied = loaded is not None and bool(specialised.copied(loaded.binary))
        if recorder is not None and copied:
            recorder.refuse(f"{specialised.name} shares variables with other kernels of its text")
        if loaded is not None and not faults.debug and not copied:
            self._make_fast(specialised, loaded)

    def _run_dry(self, args: tuple[Any, ...], named: dict[str, Any], template: dict[str, Any]) -> None:
        """An operator is asked for shapes. Nothing is launched; dtypes that the kernel does not take are told."""
        try:
            specialised = self.instance(**template)
            args = specialised.placed(args, named) if named else args
        except WrongDtype:
            raise
        except CupyopsError:  # template values may be symbols
            return
        specialised.refuse_dtypes(args)

    def _warn_of_gradients(self, given: tuple[Any, ...]) -> None:
        """Say once that no gradient flows back through a launch, where one is wanted of a tensor that it is given."""
        if self._warned_of_gradients or not torch.is_grad_enabled() or source.is_own(self._beside):
            return
        if any(one.requires_grad for value in given for one in held(value)):
            self._warned_of_gradients = True
            warnings.warn(
                f"{self} was given a tensor that requires a gradient, and none flows back through the launch of a kernel: "
                "make it an operator with cupyops.operator, which has a gradient, or launch it inside torch.no_grad()",
                stacklevel=callers.outside(),
            )

    def _warn_of_views(self, specialised: Specialised, args: tuple[Any, ...]) -> None:
        for index, value in enumerate(args):
            if isinstance(value, Tensor) and not value.is_contiguous() and index not in self._warned:
                self._warned.add(index)
                warnings.warn(
                    f"{specialised.name}: argument {index + 1} of {len(args)} is a view of shape {tuple(value.shape)} and "
                    f"strides {value.stride()}, of which a kernel gets the address alone: give its .contiguous(), for an "
                    "output a contiguous tensor, or say Kernel(..., strided=True) where the kernel is told the strides",
                    stacklevel=callers.outside(),
                )

    def _launched(
        self, specialised: Specialised, anchor: Any, configuration: Configuration, args: tuple[Any, ...]
    ) -> Loaded | None:
        if tracing.active is None:
            return specialised.launch(anchor, configuration, args)
        with tracing.launch(specialised.name, configuration.grid, configuration.block, anchor) as record:
            return specialised.launch(anchor, configuration, args, record)

    def _make_fast(self, specialised: Specialised, loaded: Loaded) -> None:
        """Let these template values, on this device, take the fast path."""
        with self._lock:
            if self._specialised.get(specialised.values) is not specialised:
                return  # the file has been edited meanwhile
            boundaries = fastpath.boundaries(loaded.arguments)
            if self._fast is None:
                self._boundaries = boundaries
                self._fast = fastpath.configure(
                    loaded.arguments, self.template, loaded.anchor, self._table, self._launch
                )
            if self._boundaries == boundaries:
                self._table[fastpath.key(specialised.values)] = loaded.entry

    def _reload(self) -> None:
        """Forget what came from files that have been edited since. A launch under way ends as it began."""
        with self._lock:
            text: source.Source | None = self.__dict__.get("source")
            if text is None:
                return
            if self._watch is None or self._watch.source is not text:
                self._watch = reload.Watch(text)
            if self._watch.edited():
                self.__dict__.pop("source", None)
                self._specialised.clear()
                self._configured.clear()
                self._table.clear()  # launch functions that somebody holds look into this very dict
                self._fast, self._table = None, {}

    def globals(self, device: str | torch.device | None = None, /, **template: Any) -> Globals:
        """The `__device__` and `__constant__` variables that this kernel sees, by name.

        Each instance of each Kernel has variables of its own, with the values that the text gives them until they are set
        or a kernel writes them. Kernels of one `cupyops.module`, `cupyops.extension` or `RawModule` have them together.

        Args:
            device: on which device; by default where launches go: the current GPU, or the CPU inside `simulate()`.
            **template: the template values of the instance.

        Returns:
            Globals: a mapping to `Variable`s, which have `get()` and `set(value)`.

        Raises:
            LaunchError: no kernel runs on that device, or wrong template values.
            InputError: when indexed with a name that the kernel does not know.

        Example:
            >>> code = '''
            ... __constant__ float weight[2] = {1, 2};
            ... __global__ void weigh(float* x) { x[threadIdx.x] *= weight[threadIdx.x]; }
            ... '''
            >>> weigh, x = cupyops.Kernel(code, "weigh"), torch.ones(2)
            >>> with cupyops.simulate():
            ...     weigh.globals()["weight"].set([3, 4])
            ...     weigh[1, 2](x)
            >>> x
            tensor([3., 4.])
        """
        if reload.wanted():
            self._reload()
        return Globals(self.instance(**template), None if device is None else torch.device(device))

    def instance(self, /, **template: Any) -> Specialised:
        """The kernel with its template values chosen: what a launch compiles, loads and runs.

        Args:
            **template: the template values.

        Returns:
            Specialised: one and the same for the same values, until the file is edited. `binary("sm_90")` compiles it, or
            finds it compiled; `on(device)` loads it on a GPU.

        Raises:
            LaunchError: a template value is missing, or is none that the kernel takes.
            SourceError: the file is not found.
            InputError: it has no such function.

        Example:
            >>> code = "template <typename T> __global__ void twice(T* x) { x[threadIdx.x] *= 2; }"
            >>> instance = cupyops.Kernel(code, "twice<T>").instance(T=torch.float32)
            >>> instance.name, instance.binary("sm_80").arch
            ('twice<float>', 'sm_80')
        """
        values = self.values(template)
        with self._lock:
            if values not in self._specialised:
                types = dict(zip(self.template, values))
                self._specialised[values] = Specialised(
                    self.source,
                    self.base,
                    self.expression(values),
                    types,
                    self.options,
                    self.arch,
                    self.strided,
                    self.extension,
                    self.shared,
                )
            return self._specialised[values]

    def _reduced(self, protocol: Any) -> Any:
        """Pickled as what it was made of, where no module has it by a name."""
        return _unpickled, (type(self), {name: one for name, one in vars(self).items() if name not in _OF_THIS_PROCESS})

    def __repr__(self) -> str:
        code = "<text>" if self.is_text else str(self._code)
        return f"Kernel({code}: {super().__repr__()})"


def _nothing(*args: Any, **template: Any) -> None:
    """The launch of a grid with a zero in it."""


def _unpickled(kind: type[Kernel], state: dict[str, Any]) -> Kernel:
    kernel = kind.__new__(kind)
    kernel.__dict__.update(state)
    kernel.shared = None
    kernel._begin()
    return kernel


def caller() -> tuple[Path | None, str]:
    """(folder, name) of the module that calls who calls this, past modules.py; no folder in a notebook or at a prompt."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") == f"{__package__}.modules":
        frame = frame.f_back
    return folder_of(inspect.getfile(frame)), frame.f_globals.get("__name__", "")


@functools.lru_cache(maxsize=64)
def folder_of(file: str) -> Path | None:
    """The folder of a module's file; None for what is none, as a cell of a notebook."""
    return Path(file).resolve().parent if os.path.isfile(file) else None
