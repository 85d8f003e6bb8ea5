"""A swap and its undo on whole models: what they compute in either mode, and that nothing else of them is another.

`python tests/support/walk.py` walks all architectures of transformers that can be built small and prints what it finds;
with names (`llama "rwkv CausalLM" timm:resnet18`), those alone. `timm:` wants timm installed.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import architectures
import torch

import cupyops

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)
LARGEST = 8_000_000  # parameters of a model that is built
SECONDS = 400  # for one model

Batch = dict[str, torch.Tensor]
Step = Callable[[Any, Batch], dict[str, torch.Tensor]]


def snapshot(model: torch.nn.Module) -> dict[Any, Any]:
    """The class and every attribute of every module: which objects they are, and what values, lists and tables hold."""
    found: dict[Any, Any] = {}
    for name, one in model.named_modules(remove_duplicate=False):
        found[name, "class"] = type(one)
        found |= {(name, key): _seen(value) for key, value in vars(one).items()}
    return found


def _seen(value: Any) -> Any:
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return id(value), value._version, value.data_ptr()
    if isinstance(value, dict):
        return id(value), [(repr(key), _seen(one)) for key, one in value.items()]
    if isinstance(value, (list, tuple, set)):
        return id(value), [_seen(one) for one in value]
    if type(value).__name__.endswith("Config"):
        return id(value), _seen(vars(value))[1]
    return id(value)


def values(model: torch.nn.Module) -> dict[Any, Any]:
    """The attributes of all modules that are plain values, or lists of such: comparable between a model and its copy."""
    found = {}
    for name, one in model.named_modules():
        for key, value in vars(one).items():
            if isinstance(value, (list, tuple)) and all(isinstance(part, PLAIN) for part in value):
                found[name, key] = [*value]
            elif isinstance(value, PLAIN):
                found[name, key] = value
    return found


def near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float, what: str) -> None:
    """Each within `rtol` of its largest element: sums are added in another order."""
    assert found.keys() == expected.keys(), what
    for name, tensor in expected.items():
        if not tensor.is_floating_point():
            assert torch.equal(found[name], tensor), f"{what}: {name}"
            continue
        bound = rtol * float(tensor.abs().max()) + 1e-6 if tensor.numel() else 0.0
        torch.testing.assert_close(
            found[name], tensor, rtol=0, atol=bound, equal_nan=True, msg=lambda text, n=name: f"{what}: {n}: {text}"
        )


def pickled(model: torch.nn.Module) -> bytes | None:
    """None of a model that cannot be pickled."""
    try:
        return pickle.dumps(model)
    except Exception:
        return None


def walk(
    make: Callable[[], torch.nn.Module],
    batch: Batch,
    step: Step = architectures.step,
    rtol: float = 1e-4,
    starts: tuple[bool, ...] = (True, False),
) -> int:
    """Swap a model and undo it, in training mode and in evaluation, and compare; how many modules a swap replaces.

    Args:
        make: gives the same model at each call.
        batch: what `step` takes.
        step: the loss and the gradients of a model.
        rtol: of the largest element of each.
        starts: the modes in which the model is swapped.
    """
    replaced = 0

    def run(one: torch.nn.Module, mode: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        return step(one.train(mode), batch)

    for start in starts:
        model, twin = make().train(start), make().train(start)
        before, saved = snapshot(model), pickled(model)
        cupyops.swap(model).undo()
        assert snapshot(model) == before, "attributes, after swap and undo"
        assert pickled(model) == saved, "pickled bytes, after swap and undo"

        swap = cupyops.swap(model)
        replaced = len(swap.replaced)
        for mode in (start, not start, start):
            near(run(model, mode), run(twin, mode), rtol, f"swapped in {start}, run in {mode}")
        assert values(model) == values(twin) | {
            key: value for key, value in values(model).items() if key not in values(twin)
        }, "plain attributes, after steps"
        near(dict(model.state_dict()), dict(twin.state_dict()), rtol, "state")
        model.zero_grad()
        if (saved := pickled(model)) is not None:
            loaded = pickle.loads(saved)
            near(run(loaded, start), run(model, start), 1e-6, "pickled while swapped")
        swap.undo()
        for name, one in model.named_modules():
            assert type(one) is before[name, "class"], f"class of {name}"
            assert vars(one).keys() == vars(twin.get_submodule(name)).keys(), f"attributes of {name}"
        near(run(model, start), run(twin, start), rtol, "undone")
    return replaced


def everything() -> Iterator[str]:
    """The names of all architectures that may be built, with the first head that each has."""
    from transformers.models.auto import modeling_auto as auto

    heads = {
        "CausalLM": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "MaskedLM": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "Seq2SeqLM": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "ImageClassification": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    }
    for head, names in heads.items():
        yield from (f"{name} {head}" for name in names)


def built(name: str) -> tuple[Callable[[], torch.nn.Module], Batch, Step] | None:
    """What makes a model, a batch and a step; None of a model that cannot be built small or does not run."""
    try:
        if name.startswith("timm:"):
            return _of_timm(name.removeprefix("timm:"))
        with torch.device("meta"):
            size = sum(p.numel() for p in architectures.build(name).parameters())
        if size > LARGEST:
            return None
        model = architectures.build(name)
        batch = architectures.inputs(model, name)
        architectures.step(model, batch)
        return functools.partial(architectures.build, name), batch, architectures.step
    except Exception:
        return None


def _of_timm(name: str) -> tuple[Callable[[], torch.nn.Module], Batch, Step]:
    import timm

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        model: torch.nn.Module = timm.create_model(name, num_classes=5)
        return model

    size = make().default_cfg["input_size"][-1]  # type: ignore[index,call-overload]
    batch = {"x": torch.randn(2, 3, size, size), "labels": torch.tensor([1, 3])}

    def step(one: Any, batch: Batch) -> dict[str, torch.Tensor]:
        one.zero_grad()
        loss = torch.nn.functional.cross_entropy(one(batch["x"]), batch["labels"])
        loss.backward()
        return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in one.named_parameters() if p.grad is not None}

    step(make(), batch)
    return make, batch, step


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main(names: list[str]) -> int:
    counts: collections.Counter[str] = collections.Counter()
    seen = set()
    for name in names or everything():
        short = name.split()[0]
        if short in seen:
            continue
        try:
            with _limited():
                found = built(name)
                if found is None:
                    counts["not built"] += 1
                    continue
                seen.add(short)
                outcome = f"right, {walk(*found)} replaced"
                counts["right"] += 1
        except Exception as error:
            seen.add(short)
            outcome = f"WRONG: {type(error).__name__}: {str(error).strip()[:300]}"
            counts["wrong"] += 1
        print(f"{name}: {outcome}", flush=True)
    print(*(f"{count} {what}" for what, count in counts.items()), sep=", ")
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main(sys.argv[1:]))
