"""The GPU's half: run a stored case, and count how its results differ from the simulator's."""

from __future__ import annotations

from typing import Any

import numpy as np

from .device import Device
from .store import Reader
from .values import FORMATS

_SHOWN = 3  # differences that a row keeps as examples


def on_device(case: dict[str, Any], cubin: bytes, reader: Reader, device: Device) -> list[np.ndarray]:
    """The arrays that are the case's arguments, as the GPU left them; the others are empty."""
    held = [reader.get(a["before"]) if a["kind"] == "array" else np.zeros(0, np.uint8) for a in case["arguments"]]
    addresses = [device.allocate(data) if a["kind"] == "array" else 0 for a, data in zip(case["arguments"], held)]
    values: list[int | bytes] = []
    for argument, address in zip(case["arguments"], addresses):
        if argument["kind"] == "int":
            values.append(int(argument["value"]).to_bytes(4, "little", signed=True))
        elif argument["kind"] == "map":
            values.append(device.tensor_map(argument, addresses[argument["array"]]))
        else:
            values.append(address)
    device.launch(cubin, case["kernel"], case["grid"], case["block"], case["shared"], values)
    for argument, address, data in zip(case["arguments"], addresses, held):
        if argument["kind"] == "array":
            device.read(address, data)
            device.free(address)
    return held


def row(case: dict[str, Any], reader: Reader, found: list[np.ndarray]) -> dict[str, Any]:
    """The case's line of the report: the sum over its outputs."""
    total = new_row(case["name"], case["how"])
    for argument, gpu in zip(case["arguments"], found):
        if argument["kind"] == "array" and argument["after"]:
            compare(total, reader.get(argument["after"]), gpu, argument["format"])
    if total["mismatches"]:
        _add_examples(total, case, reader, found)
    return total


def new_row(name: str, how: str) -> dict[str, Any]:
    """A line on which nothing has been counted."""
    zeros = dict.fromkeys(("count", "mismatches", "nan_payloads", "max_ulp", "mean_ulp", "scaled_ulp", "max_abs"), 0)
    return {"name": name, "how": how, **zeros, "error": "", "examples": []}


def compare(total: dict[str, Any], simulated: np.ndarray, gpu: np.ndarray, format_: str) -> None:
    """Count the differences of one output into the line. Two NaN of different bits are counted apart."""
    simulated, gpu = simulated.reshape(-1), gpu.reshape(-1)
    if format_:
        width = sum(FORMATS[format_]) + 1
        simulated, gpu = (x.view(np.uint8).view(f"u{width // 8}") for x in (simulated, gpu))
    differ = simulated != gpu
    if format_:
        both_nan = _is_nan(simulated, format_) & _is_nan(gpu, format_)
        total["nan_payloads"] += int((differ & both_nan).sum())
        differ &= ~both_nan
        _count_ulp(total, simulated[~both_nan], gpu[~both_nan], format_)
    total["count"] += len(simulated)
    total["mismatches"] += int(differ.sum())


def _is_nan(bits: np.ndarray, format_: str) -> np.ndarray:
    exponent, fraction = FORMATS[format_]
    infinity = ((1 << exponent) - 1) << fraction
    return (bits & bits.dtype.type((1 << exponent + fraction) - 1)) > bits.dtype.type(infinity)


def _count_ulp(total: dict[str, Any], simulated: np.ndarray, gpu: np.ndarray, format_: str) -> None:
    """Differences counted in floats that lie between, in ulp of the largest result, and as they are."""
    if not len(simulated):
        return
    steps = np.abs(_ordered(simulated, format_) - _ordered(gpu, format_))
    before, count = total["mean_ulp"] * total["count"], total["count"] + len(simulated)
    total["max_ulp"] = max(total["max_ulp"], float(steps.max()))
    total["mean_ulp"] = float((before + steps.sum()) / count)
    a, b = as_float64(simulated, format_), as_float64(gpu, format_)
    finite = np.isfinite(a) & np.isfinite(b)
    if finite.any():
        apart = float(np.abs(a - b)[finite].max())
        largest = float(np.abs(a[finite]).max())
        total["max_abs"] = max(total["max_abs"], apart)
        if largest:
            ulp = 2.0 ** (np.floor(np.log2(largest)) - FORMATS[format_][1])
            total["scaled_ulp"] = max(total["scaled_ulp"], apart / ulp)


def _ordered(bits: np.ndarray, format_: str) -> np.ndarray:
    """Numbers in the order of the floats, next ones one apart; in float64, which is exact up to 2^53."""
    exponent, fraction = FORMATS[format_]
    sign = bits.dtype.type(1 << exponent + fraction)
    magnitude = (bits & ~sign).astype(np.float64)
    return np.where(bits & sign, -magnitude, magnitude)


def as_float64(bits: np.ndarray, format_: str) -> np.ndarray:
    """The values."""
    with np.errstate(all="ignore"):
        if format_ == "bf16":
            return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
        return bits.view({"f16": np.float16, "f32": np.float32, "f64": np.float64}[format_]).astype(np.float64)


def _add_examples(total: dict[str, Any], case: dict[str, Any], reader: Reader, found: list[np.ndarray]) -> None:
    """The first differences, with the inputs of the same element where there are any."""
    arrays = [(a, gpu) for a, gpu in zip(case["arguments"], found) if a["kind"] == "array"]
    for argument, gpu in arrays:
        if not argument["after"]:
            continue
        simulated = reader.get(argument["after"]).reshape(-1)
        result = gpu.reshape(-1)
        differ = simulated != result
        if argument["format"] and simulated.dtype.itemsize == (sum(FORMATS[argument["format"]]) + 1) // 8:
            differ &= ~(_is_nan(simulated, argument["format"]) & _is_nan(result, argument["format"]))
        for place in np.flatnonzero(differ)[:_SHOWN]:
            inputs = [reader.get(a["before"]).reshape(-1) for a, _ in arrays if not a["after"] or a is argument]
            operands = [hex(x[place]) for x in inputs if len(x) == len(simulated)]
            total["examples"].append(
                {"at": int(place), "inputs": operands, "simulator": hex(simulated[place]), "gpu": hex(result[place])}
            )
