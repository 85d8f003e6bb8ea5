"""A swap and its undo on whole models: what they compute in either mode, and that nothing else of them is another.

`python tests/support/walk.py` walks the models of `zoo.py`, those of transformers, timm, torchvision and diffusers that can
be built small, and writes a row for each case of each; with names (`timm:`, `transformers:llama`), those that begin so.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import csv
import pickle
import random
import signal
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import zoo

import cupyops

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)
SECONDS = 120  # of the processor's time, for one model


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


CASES = (
    "undone at once", "copied", "trained", "evaluated", "then evaluated", "then trained", "state", "pickled", "undone",
)  # fmt: skip


def walk(make: zoo.Make, batch: zoo.Batch, rtol: float = 1e-4) -> dict[str, str]:
    """Swap a model and undo it, in training mode and in evaluation, and compare; what is wrong, by case.

    Args:
        make: gives the same model at each call.
        batch: what the model takes.
        rtol: of the largest element of each result and each gradient.
    """
    wrong: dict[str, str] = {}

    @contextlib.contextmanager
    def case(name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            wrong.setdefault(name, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")

    def run(one: torch.nn.Module, mode: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        return zoo.step(one.train(mode), batch)

    for start in (True, False):
        model, twin = make().train(start), make().train(start)
        before, saved = snapshot(model), pickled(model)
        with case("undone at once"):
            cupyops.swap(model).undo()
            assert snapshot(model) == before, "attributes, after swap and undo"
            assert pickled(model) == saved, "pickled bytes, after swap and undo"

        swap = cupyops.swap(model)
        with case("copied"), torch.inference_mode():
            near(run(copy.deepcopy(model), False), run(copy.deepcopy(twin), False), rtol, "a copy in inference mode")
        for mode, name in (
            (start, "trained" if start else "evaluated"),
            (not start, "then evaluated" if start else "then trained"),
        ):
            with case(name):
                near(run(model, mode), run(twin, mode), rtol, f"swapped in {start}, run in {mode}")
        with case("state"):
            assert values(model) == values(model) | values(twin), "plain attributes, after steps"
            near(dict(model.state_dict()), dict(twin.state_dict()), rtol, "state")
            assert [*model.state_dict()] == [*twin.state_dict()]
        with case("pickled"):
            model.zero_grad()
            again = pickled(model)
            assert again is not None or pickled(twin) is None, "cannot be pickled any more"  # hooks that calls leave
            if again is not None:
                loaded = pickle.loads(again)
                near(run(loaded, start), run(model, start), 1e-6, "pickled while swapped")
                run(twin, start)
        with case("undone"):
            swap.undo()
            for (name, one), other in zip(model.named_modules(), twin.modules(), strict=True):
                # a model may replace a module itself; one with parametrizations has a class of its own
                assert type(one) in (type(other), before.get((name, "class"))), f"class of {name}"
                assert vars(one).keys() == vars(other).keys(), f"attributes of {name}"
            model.train(not start), twin.train(not start)  # which empties what some keep between calls
            near(run(model, start), run(twin, start), rtol, "undone")
    return wrong


class TooSlow(BaseException):
    """No error of a model."""


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooSlow(f"took more than {SECONDS} seconds")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def outcome(name: str) -> tuple[str, dict[str, str]]:
    """("right", "wrong", "not built" or "too slow", and why, by case)."""
    try:
        with _limited():
            try:
                found = zoo.built(name)
            except Exception as error:
                return "not built", {"": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
            wrong = walk(*found)
            return "wrong" if wrong else "right", wrong
    except TooSlow as error:
        return "too slow", {"": str(error)}


def main(starts: list[str]) -> int:
    """Write (library, model, case, result, reason) to the standard output; what was counted, to the error output."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    table, seen = csv.writer(sys.stdout), set()
    for name in zoo.names():
        library, _, model = name.partition(":")
        if (short := name.split()[0]) in seen or (starts and not name.startswith(tuple(starts))):
            continue
        result, reasons = outcome(name)
        if result != "not built":
            seen.add(short)
        counts[library, result] += 1
        for case in CASES if result in ("right", "wrong") else ("",):
            verdict = "right" if result == "wrong" and case not in reasons else result
            table.writerow((library, model.strip(), case, verdict, reasons.get(case, "")))
        sys.stdout.flush()
    print(
        *(f"{library}: {count} {what}" for (library, what), count in sorted(counts.items())), sep="\n", file=sys.stderr
    )
    return int(any(what == "wrong" for _, what in counts))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main(sys.argv[1:]))
