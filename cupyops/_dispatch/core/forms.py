"""A form is one way to compute an operator: a kernel, when it is right, when it is fast, and how it is launched.

Each family has a list of forms for each direction. The first that neither cannot compute a problem nor would be slower than
a later one is launched. The lists are what `python -m cupyops explain` and the table in cuda_src/README.md show, and
`use_form` asks for one by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from ..._kernel.kernel import Kernel
from ..._util import by_need, observed
from ...errors import InputError
from .gpu import Gpu

P = TypeVar("P")  # a family's problem: a NamedTuple of sizes and flags
E = TypeVar("E")  # a NamedTuple of a family


@dataclass(frozen=True)
class Library:
    """PyTorch's functions in the place of a launch; `by` names the form that says which, and of what."""

    by: str


@dataclass(frozen=True)
class Launch(Generic[E]):
    """A kernel with its grid, block, shared memory and template values; call it with the kernel's arguments.

    Attributes:
        kernel: None in a form that many kernels have, as those of users' operators do; `by` says which.
        named: what the form decides and the kernel takes, by the names of its parameters: stages, vectors of a thread.
        args: what the form decides and the kernel takes after the caller's arguments: sizes, packed structs.
        extra: what the form decides and the host needs: the family's NamedTuple.
    """

    kernel: Kernel
    grid: int | tuple[int, ...]
    block: int | tuple[int, ...]
    shared: int = 0
    template: Mapping[str, Any] = field(default_factory=dict)
    cluster: int | tuple[int, ...] | None = None
    overlap: bool = False
    named: Mapping[str, Any] = field(default_factory=dict)
    args: tuple[Any, ...] = ()
    extra: E = None  # type: ignore[assignment]

    def __call__(self, *args: Any, **template: Any) -> None:
        """Launch on the current stream."""
        if self.cluster is None and not self.overlap:
            launch = self.kernel[self.grid, self.block, self.shared]
        else:
            launch = self.kernel.configure(
                self.grid, self.block, shared=self.shared, cluster=self.cluster, overlap=self.overlap
            )
        launch(*args, *self.args, **self.named, **self.template, **template)

    def by(self, kernel: Kernel) -> Launch[E]:
        """Return a copy of the launch for another kernel."""
        return replace(self, kernel=kernel)


class Form(Generic[P]):
    """One way to compute a problem. Subclass it, or give the three functions."""

    name: str = ""  # unique in its list, in the words of the field: "sub_warp", "two_pass"
    summary: str = ""  # which thread or block owns what, in one line, for `explain`
    measured: str = ""  # what the form gains over the next that fits, and on which card, for `explain`
    uses: tuple[Kernel, ...] = ()  # the kernels that it launches, where that is not its attribute `kernel` alone
    kernel: Kernel

    def __init__(self, kernel: Kernel | None = None) -> None:
        if kernel is not None:
            self.kernel = kernel

    def why_not(self, problem: P, gpu: Gpu) -> str | None:
        """Return why the kernel cannot compute the problem, or None. A form that is asked for is held to this alone."""
        return None

    def why_slower(self, problem: P, gpu: Gpu) -> str | None:
        """Return why a later form of the list is faster for the problem, or None."""
        return None

    def launch(self, problem: P, gpu: Gpu) -> Launch[Any] | Library:
        """The launch, for a problem that the kernel can compute."""
        raise NotImplementedError

    def kernels(self) -> tuple[Kernel, ...]:
        """Return the kernels that it launches."""
        kernel: Kernel | None = getattr(self, "kernel", None)
        return self.uses or (() if kernel is None else (kernel,))


@dataclass(frozen=True)
class Choice(Generic[P]):
    """Form chosen for a problem, and the reasons against each form before it, as `explain` shows them."""

    forms: Forms[P]
    problem: P
    gpu: Gpu
    chosen: Form[P]
    passed_over: tuple[tuple[Form[P], str], ...]


class Forms(Generic[P]):
    """The forms of a family in one direction, the first that fits first.

    Args:
        family: "norm", "softmax".
        direction: "forward" or "backward"; or another word where a family has more.
        forms: in order. The last has no `why_slower`.
    """

    def __init__(self, family: str, direction: str, forms: Sequence[Form[P]]) -> None:
        self.family, self.direction, self.list = family, direction, tuple(forms)
        names = [form.name for form in self.list]
        if len(set(names)) != len(names) or not all(name.isidentifier() for name in names):
            raise InputError(
                f"forms of {family}: the names {', '.join(names)} are not all different identifiers; rename them"
            )
        self._chosen = functools.lru_cache(maxsize=4096)(self._choose)
        self._launches = functools.lru_cache(maxsize=4096)(self._launch)
        _lists.append(self)

    def choose(self, problem: P, gpu: Gpu) -> Form[P]:
        """The form for a problem, which is hashable; the one that is asked for, where there is one."""
        choice = self._chosen(problem, gpu, _asked.get((self.family, self.direction)))
        for listener in listeners:
            listener(choice)
        return choice.chosen

    def launch(self, problem: P, gpu: Gpu) -> Launch[Any]:
        """The launch of the form for a problem, in a list whose forms all have kernels."""
        plan = self.plan(problem, gpu)
        assert isinstance(plan, Launch)
        return plan

    def plan(self, problem: P, gpu: Gpu) -> Launch[Any] | Library:
        """The launch of the form for a problem, or PyTorch's functions."""
        if listeners:
            self.choose(problem, gpu)
        return self._launches(problem, gpu, _asked.get((self.family, self.direction)))

    def _launch(self, problem: P, gpu: Gpu, asked: str | None) -> Launch[Any] | Library:
        return self._chosen(problem, gpu, asked).chosen.launch(problem, gpu)

    def _choose(self, problem: P, gpu: Gpu, asked: str | None) -> Choice[P]:
        if asked is not None:
            form = next(form for form in self.list if form.name == asked)
            if reason := form.why_not(problem, gpu):
                raise InputError(
                    f"{self.family}, {self.direction}: the form {asked} was asked for, but {reason}; use another"
                )
            return Choice(self, problem, gpu, form, ())
        passed_over: list[tuple[Form[P], str]] = []
        for form in self.list:
            reason = form.why_not(problem, gpu) or form.why_slower(problem, gpu)
            if reason is None:
                return Choice(self, problem, gpu, form, tuple(passed_over))
            passed_over.append((form, reason))
        reasons = "; ".join(f"{form.name}: {reason}" for form, reason in passed_over)
        raise InputError(
            f"{self.family}, {self.direction}: no form fits {problem} ({reasons}); call PyTorch's own function"
        )


_lists: list[Forms[Any]] = []
_asked: dict[tuple[str, str], str] = {}
listeners: list[Callable[[Choice[Any]], None]] = []


def families() -> list[Forms[Any]]:
    """Every list of forms, in the order in which they were made."""
    by_need.load()
    return list(_lists)


def asked() -> dict[tuple[str, str], str]:
    """The form that is asked for now, by family and direction."""
    return _asked


@contextmanager
def use_form(*names: str) -> Iterator[None]:
    """Ask for forms by name inside a `with` block: for tests, benchmarks and comparisons of one form with another.

    Calls inside are made in full: no recorded plan is replayed, and none is recorded. It holds for all threads.

    Args:
        *names: `"family:form"`, such as `"norm:two_pass"`, for each direction that has such a form;
            `"norm.backward:two_pass"` for one.

    Raises:
        InputError: there is no such form; or, when an operator is called, the form cannot compute what it is given.

    Example:
        >>> with cupyops.use_form("softmax:two_pass"):
        ...     y = cupyops.softmax(torch.randn(8, 64), -1)
    """
    wanted = dict(_asked)
    for name in names:
        wanted |= _forms_named(name)
    before = dict(_asked)
    _asked.clear()
    _asked.update(wanted)
    observed.go_plainly()
    try:
        yield
    finally:
        observed.go_plainly(-1)
        _asked.clear()
        _asked.update(before)


def _forms_named(name: str) -> dict[tuple[str, str], str]:
    """The lists of which `name` asks a form, each with the form's name."""
    by_need.load()
    place, _, form = name.partition(":")
    family, _, direction = place.partition(".")
    lists = [one for one in _lists if one.family == family and direction in ("", one.direction)]
    found = {(one.family, one.direction): form for one in lists if form in [other.name for other in one.list]}
    if not found:
        known = [f"{one.family}.{one.direction}:{other.name}" for one in lists or _lists for other in one.list]
        raise InputError(f"there is no form {name!r}; there are {', '.join(known)}")
    return found
