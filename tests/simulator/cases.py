"""Calls that reach every instance of every kernel of cuda_src: the samples of the contracts, and what those leave out.

All compare with PyTorch, by the bound of the contract or of the test that they are taken from; run them inside
`cupyops.simulate()`.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import attentions
import byte_products
import few_channels
import few_rows_calls
import gemms
import groups
import kept
import loss_parts
import pixels
import samples
import torch
from contract import DTYPES, Make, OperatorContract, Sample
from softmaxes import SoftmaxContract, form_cases

import cupyops.nn
import cupyops.optim
import cupyops.testing
from cupyops._dispatch.attention import attention
from cupyops._dispatch.core.forms import use_form
from cupyops._dispatch.gemm import epilogues, gemm
from cupyops._kernel import kernel
from cupyops._kernel.compile import compiler, source
from cupyops._kernel.launch.ctype import c_token
from cupyops.cli import jobs

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS.parent / "tools"))

from operator_samples import operator_of  # noqa: E402

CPU = torch.device("cpu")
HALF = (torch.float16, torch.bfloat16)
_TOKENS = "|".join(map(c_token, DTYPES))

KERNELS = kernel.kernels(source.cuda_src())
OPERATORS = sorted({operator_of(k.source.name) for k in KERNELS})

Call = Callable[[], None]


# --- instances -------------------------------------------------------------------------------------------------------


def instances(operator: str, dtype: torch.dtype) -> list[jobs.Job]:
    """What the kernels of an operator's files declare for T = dtype, for sm_80, or for the one target that they have."""
    first, of_a_type = (re.compile(rf"\w+<({token})[,>]") for token in (c_token(dtype), _TOKENS))
    every = [k for k in KERNELS if operator_of(k.source.name) == operator]
    planned = jobs.plan([k for k in every if not k.arch], ["sm_80"]) + jobs.plan(
        [k for k in every if k.arch], ["sm_90"]
    )
    of_no_type = torch.float16  # kernels without a type of elements count once
    return [job for job in planned if first.match(job.name) or (dtype is of_no_type and not of_a_type.match(job.name))]


def arch_of(operator: str, dtype: torch.dtype) -> str:
    """Where its instances run: see `kept.arch`, or where the kernels are for one target alone."""
    own = any(k.arch for k in KERNELS if operator_of(k.source.name) == operator)
    return "sm_90" if own else kept.arch(dtype)


def ptx(job: jobs.Job, arch: str) -> str:
    """The text of an instance, without the line that names the architecture."""
    binary = compiler.build(job.source, job.name, arch, job.options)
    return re.sub(r"^\.target.*$", "", binary.ptx, flags=re.MULTILINE)


_ASKED = re.compile(r"__CUDA_ARCH__( >= (\d+))?")


def has_own_code(of: source.Source) -> bool:
    """Whether the preprocessor may find another text for sm_90 than for sm_80 in a source and what it includes."""
    asked = [number for text in (of.text, *of.includes.values()) for _, number in _ASKED.findall(text)]
    return any(not number or 80 < int(number) // 10 <= 90 for number in asked)


def differs(job: jobs.Job) -> bool:
    """Whether our code makes the text of an instance for sm_90 another than for sm_80.

    The instance for float tells it, where there is one: all dtypes have the same code, and CUDA's headers have none of
    their own there.
    """
    if job.arch.endswith("a") or not has_own_code(job.source):
        return False
    twin = replace(job, name=re.sub(r"<\w+", "<float", job.name, count=1))
    if any(twin.name in k.instances() for k in KERNELS if k.source.name == job.source.name):
        job = twin
    return ptx(job, "sm_80") != ptx(job, "sm_90")


# --- calls -----------------------------------------------------------------------------------------------------------


@cache
def contracts() -> dict[str, list[type[OperatorContract]]]:
    """For the kernels of each operator the contracts that launch them: its own first, and those of others."""
    found: dict[str, list[type[OperatorContract]]] = {}
    for path in sorted((TESTS / "ops").glob("test_*.py")):
        name = path.stem.removeprefix("test_")
        for contract in samples.of_file(name):
            for operator in sorted({operator_of(k.source.name) for k in KERNELS if k.base in contract.kernels}):
                among = found.setdefault(operator, [])
                among.insert(0 if name == operator else len(among), contract)
    return found


def calls(operator: str, dtype: torch.dtype) -> Iterator[Call]:
    """What to run for an operator, piece by piece; nothing, where it has no kernel for the dtype."""
    if not instances(operator, dtype):
        return
    for contract in contracts().get(operator, []):
        test = contract()
        for sample in test.samples(Make(CPU, dtype)):
            yield partial(test.compare, sample, repr(sample))
        if isinstance(test, SoftmaxContract):
            yield from softmax_forms(test, dtype)
    yield from FURTHER.get(operator, lambda dtype: [])(dtype)


def tiles(name: str, samples: Callable[[Make], Iterator[Sample]], dtype: torch.dtype) -> Iterator[Call]:
    """Every tile of a GEMM, several tiles in each direction, with tails; k in one piece and in several."""
    wide = [] if name == "conv2d" or dtype not in HALF else [gemm.WIDE]
    for tile in (*gemm.tiles_for(dtype), *wide):
        for sample in samples(Make(CPU, dtype)):
            yield partial(tiled, name, dtype, tile, sample)


def tiled(name: str, dtype: torch.dtype, tile: int, sample: Sample) -> None:
    with gemms.tiled(name, dtype, tile):
        samples.contract(name)().compare(sample, f"tile {tile}, {sample!r}")


def products(make: Make) -> Iterator[Sample]:
    yield Sample(make(131, 40), make(40, 136))
    yield Sample(make(5, 448), make(448, 8))


def activated_layers(make: Make) -> Iterator[Sample]:
    yield Sample(make(131, 40), make(136, 40), make(136), "gelu", make(131, 136))
    yield Sample(make(5, 448), make(8, 448), None, "silu")


def affine(make: Make) -> Iterator[Sample]:
    yield Sample(make(131, 40), make(136, 40))
    yield Sample(make(5, 448), make(8, 448))


def convolutions(make: Make) -> Iterator[Sample]:
    yield Sample(make(1, 8, 9, 9), make(136, 8, 2, 2), make(136), padding=1)
    yield Sample(make(1, 3, 6, 12), make(131, 3, 2, 2))


def softmax_forms(test: SoftmaxContract, dtype: torch.dtype) -> Iterator[Call]:
    """Each form, asked for by name."""
    for case in form_cases(dtype, clusters=False):
        yield partial(test.check_form, dtype, *case)


def persistent_losses(operator: str, dtype: torch.dtype) -> Iterator[Call]:
    """Rows in the shared memory of blocks of each size."""
    make, contract = Make(CPU, dtype), contracts()[operator][0]
    for classes in (size // dtype.itemsize + 1 for size in (4000, 20000, 40000) if dtype is not torch.float64):
        target = make.integers(3, high=classes)
        logits = (make(3, 4), make(classes, 4), target) if "linear" in operator else (make(3, classes), target)
        yield partial(in_small_shared_memory, operator, contract, Sample(*logits))


def in_small_shared_memory(operator: str, contract: type[OperatorContract], sample: Sample) -> None:
    gpu = {"multiprocessors": 2, "shared": 60000, "shared_total": 61024}
    with cupyops.testing.assume_gpu(**gpu), cupyops.use_form(f"{operator}:persistent"):
        contract().compare(sample, f"persistent, {sample!r}")


def optimizer_steps(contract: str, dtype: torch.dtype) -> Iterator[Call]:
    """Two steps of every shape that the optimizers' tests have, with the options that reach every instance."""
    module, _, name = contract.partition(".")
    test = getattr(importlib.import_module(f"optim.{module}"), name)()
    parameters = importlib.import_module("optim.contract").parameters
    for options in test.simulated:
        yield partial(test.compare, partial(parameters, CPU, dtype), {"lr": 0.1, **options}, steps=2)


def steps_of_halves(dtype: torch.dtype) -> Iterator[Call]:
    """With masters and by stochastic rounding, and what each does with and without amsgrad."""
    stepped = importlib.import_module("optim.test_adam_half").stepped
    for way in ("master_weights", *(["stochastic_rounding"] if dtype is torch.bfloat16 else [])):
        for options in ({"weight_decay": 0.1}, {"amsgrad": True, "fused": True}) if dtype in HALF else ():
            yield partial(stepped, dtype, CPU, **{way: True}, **options)


def gradients_clipped(dtype: torch.dtype) -> Iterator[Call]:
    """The norms of gradients, and what is too large."""
    yield partial(importlib.import_module("optim.test_clip").clipped, dtype, CPU)


def little_scratch(dtype: torch.dtype) -> Iterator[Call]:
    """Logits in chunks of rows and tiles of classes; none at all."""
    contract = contracts()["fused_linear_cross_entropy"][0]
    make = Make(CPU, dtype)
    sample = Sample(make(19, 7), make(37, 7), make.integers(19, high=37), make(37), ignore_index=3)
    if dtype in HALF:
        yield partial(in_scratch, 300, contract, sample)
        yield from loss_parts.calls(dtype, "cpu")
    yield from persistent_losses("fused_linear_cross_entropy", dtype)


def in_scratch(size: int, contract: type[OperatorContract], sample: Sample) -> None:
    with cupyops.testing.assume_gpu(scratch=size):
        contract().compare(sample, f"in {size} bytes, {sample!r}")


def indices_sorted(dtype: torch.dtype) -> Iterator[Call]:
    """As where there are many."""
    make, contract = Make(CPU, dtype), contracts()["embedding"][0]

    def run(sample: Sample) -> None:
        with use_form("embedding:sorted"):
            contract().compare(sample, f"sorted, {sample!r}")

    yield partial(run, Sample(make.integers(300, high=5), make(5, 40), 2))


def of_few_channels(dtype: torch.dtype) -> Iterator[Call]:
    """Every form of the kernels for few channels."""
    for contract in contracts()["conv2d"]:
        for form in few_channels.forms():
            for sample in few_channels.samples(Make(CPU, dtype)):
                yield partial(few_channels.compare, contract, form, sample)


def prefetched_late(dtype: torch.dtype) -> Iterator[Call]:
    """Rows whose statistics are prefetched late in backward, as those of wider ones are."""
    make, size = Make(CPU, dtype), 4096 // dtype.itemsize

    def run(contract: type[OperatorContract], sample: Sample) -> None:
        with cupyops.use_form("norm:prefetch_late"):
            contract().compare(sample, f"late, {sample!r}")

    for contract in contracts()["norm"] if dtype.itemsize <= 4 else ():
        inputs = [make(5, size) for _ in range(1 + (contract.function is cupyops.add_rms_norm))]
        yield partial(run, contract, Sample(*inputs, (size,), make(size)))


def wide_caches(dtype: torch.dtype) -> Iterator[Call]:
    """Wide rows, and many that share keys, in as much shared memory as Hopper has; many also in as little as there is."""
    make, contract = Make(CPU, dtype, requires_grad=False), contracts()["decode_attention"][0]

    def run(heads: int, width: int, shared: int = 232448) -> None:
        sample = Sample(make(1, 1, heads, width), make(1, 500, 1, width), make(1, 500, 1, width))
        with cupyops.simulate("sm_90"), cupyops.testing.assume_gpu(shared=shared):
            contract().compare(sample, f"in {shared} bytes of shared memory, {sample!r}")

    for given in ((2, 256), (40, 64), (40, 128), (40, 128, 101376)) if dtype in HALF else ():
        yield partial(run, *given)


def grouped(dtype: torch.dtype) -> Iterator[Call]:
    """Groups of channels of as many elements as a group has vectors, short ones of each length; and what a warp holds."""
    make, channels, contract = Make(CPU, dtype), 16 // dtype.itemsize, contracts()["group_norm"][0]()
    for vectors in (49, 61, 121, 251, 421, 501, 801):
        sample = Sample(make(2, channels, vectors), 1, make(channels), make(channels))
        yield partial(contract.compare, sample, f"{vectors} vectors")


def by_wgmma(dtype: torch.dtype) -> Iterator[Call]:
    for form, layout in gemms.WGMMA if dtype in HALF else ():
        yield partial(gemms.compare_wgmma, form, layout, dtype, "cpu")


def dense_products(dtype: torch.dtype) -> Iterator[Call]:
    """Each tile of the operators that share the kernels."""
    yield from tiles("matmul", products, dtype)
    yield from tiles("linear", affine, dtype)
    yield from tiles("linear_act", activated_layers, dtype)


def activated(dtype: torch.dtype) -> Iterator[Call]:
    for activation in epilogues.ACTIVATIONS if dtype in HALF else ():
        yield from gemms.activated(epilogues.ACTIVATED, activation, dtype, "cpu")


def gated(dtype: torch.dtype) -> Iterator[Call]:
    for activation in epilogues.GATES if dtype in HALF else ():
        yield from gemms.gated(epilogues.GATED, activation, dtype, "cpu")


def by_groups(dtype: torch.dtype) -> Iterator[Call]:
    if dtype in HALF:
        yield from groups.calls(dtype, "cpu")


def by_bytes(dtype: torch.dtype) -> Iterator[Call]:
    if dtype is not torch.float64:
        yield from byte_products.calls(dtype, "cpu")


def attended(dtype: torch.dtype) -> Iterator[Call]:
    """Each form of attention, of each width and bounds."""
    for call in [call for calls in attentions.CALLS.values() for call in calls] if dtype in HALF else ():
        yield partial(call, dtype, "cpu")
    if dtype in HALF:
        yield partial(masked, dtype)


def masked(dtype: torch.dtype) -> None:
    """Attention whose mask needs a map."""
    q, k = Make(CPU, dtype)(1, 1, 70, 16), Make(CPU, dtype)(1, 1, 40, 16)
    y = cupyops.attention(q, k, k, mask="(q + k) % 3 == 0")
    rows, columns = torch.arange(70)[:, None], torch.arange(40)
    exact = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), k.double(), (rows + columns) % 3 == 0
    )
    assert (y.double() - exact).abs().max() <= 8e-3 * exact.abs().max()


def convolved(dtype: torch.dtype) -> Iterator[Call]:
    yield from tiles("conv2d", convolutions, dtype)
    if dtype in HALF:
        make = Make(CPU, dtype)
        yield partial(tiled, "conv2d", dtype, 32, Sample(make(1, 112, 2, 2), make(2, 112, 2, 2)))  # forward splits k
    yield from of_few_channels(dtype)
    yield from pixels.calls(dtype)


def attended_and_cleared(dtype: torch.dtype) -> Iterator[Call]:
    yield from attended(dtype)
    if dtype is torch.float16:
        yield from (partial(cleared, index) for index in (torch.int32, torch.int64))


def cleared(index: torch.dtype) -> None:
    """What two packed sequences have not: a row before them, two behind them, and of the second two beyond the longest."""
    for lse in (torch.ones(2, 11), None):
        x = torch.ones(1, 2, 11, 16, dtype=torch.float16)
        attention.clear(x, torch.tensor([1, 4, 9], dtype=index), 3, lse)
        left = torch.tensor([0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0])
        torch.testing.assert_close(x, left.half()[:, None].expand_as(x), rtol=0, atol=0)
        if lse is not None:
            expected = torch.where(left > 0, 1.0, -torch.inf).expand_as(lse)
            torch.testing.assert_close(lse, expected, rtol=0, atol=0)


FURTHER: dict[str, Callable[[torch.dtype], Iterator[Call]]] = {
    "attention": attended_and_cleared,
    "gemm_wgmma": by_wgmma,
    "gemm": dense_products,
    "few_rows": partial(few_rows_calls.calls, device="cpu"),
    "linear_act": activated,
    "gated_linear": gated,
    "grouped_mm": by_groups,
    "scaled_mm": by_bytes,
    "cross_entropy": partial(persistent_losses, "cross_entropy"),
    "conv2d": convolved,
    "adam": partial(optimizer_steps, "test_adam.TestAdam"),
    "adam_half": steps_of_halves,
    "grad_norm": gradients_clipped,
    "lion": partial(optimizer_steps, "test_lion.TestLion"),
    "sgd": partial(optimizer_steps, "test_sgd.TestSGD"),
    "decode_attention": wide_caches,
    "embedding": indices_sorted,
    "group_norm": grouped,
    "norm": prefetched_late,
    "fused_linear_cross_entropy": little_scratch,
}
