"""A stand-in for the driver: the generated code of plans runs on the CPU, and its launches in the simulator.

A launch reads the parameter buffer as the driver would: through the array of pointers, by the sizes of the PTX. Addresses
become tensors again, by the memory that is known.
"""

from __future__ import annotations

import ctypes
import gc
import struct
import weakref
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

import cupyops
from cupyops._kernel.launch.pointers import Pointers
from cupyops._kernel.launch.tensor_map import TensorMap
from cupyops._operator.derivation import build, plans
from cupyops._operator.derivation.constants import AccessorRef, MapRef, PointersRef, Ref, freeze
from cupyops._util.allocations import Allocations
from cupyops.simulator import TensorMap as Simulated

ARCH = "sm_80"


class Known(Allocations):
    """Remembers the memory of each tensor that a function of PyTorch gives."""

    transparent = True
    wanted = frozenset()

    def __init__(self):
        super().__init__()
        self.storages = {}
        self.launches = []
        self.maps = []  # what was done to tensor maps
        self.failures = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs)
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(one, Tensor):
                with torch._C.DisableTorchFunction():
                    self.know(one)
        return result

    def know(self, tensor):
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # of a transform of torch.func
            return
        if storage.nbytes():
            self.storages[storage.data_ptr()] = weakref.ref(storage)

    def at(self, address, dtype):
        """What lies at an address, to the end of its memory."""
        found = self._found(address, dtype)
        if found is None:  # made by autograd, say, or of an array
            for one in gc.get_objects():
                if type(one) is Tensor and one.device.type == "cpu" and one.layout is torch.strided:
                    self.know(one)
            found = self._found(address, dtype)
        assert found is not None, f"a launch was given {address:#x}, where no tensor is"
        return found

    def _found(self, address, dtype):
        for start, reference in self.storages.items():
            storage = reference()
            if storage is not None and start <= address < start + storage.nbytes():
                offset = (address - start) // dtype.itemsize
                assert (address - start) % dtype.itemsize == 0
                count = storage.nbytes() // dtype.itemsize - offset
                return torch.empty(0, dtype=dtype).set_(storage, offset, (count,), (1,))
        return None


class Machine:
    """Where generated code allocates and launches."""

    index = 0
    arch = ARCH
    known = None  # while `driver()` is open

    def __init__(self, device):
        self.device = device

    def empty(self, size, stride, dtype):
        assert all(type(one) is tuple for one in (size, stride))
        return torch.empty_strided(size, stride, dtype=dtype, device=self.device)

    def encode_tensor_map(self, place, description, address):
        assert place % 64 == 0
        ctypes.memmove(place, Simulated(address - description.before, *description[:-2]).encode(), 128)
        self.known.maps.append("encoded")

    def replace_address(self, place, address):
        found = Simulated.decode(ctypes.string_at(place, 128))
        ctypes.memmove(place, replace(found, address=address).encode(), 128)
        self.known.maps.append("replaced")

    def stream(self, index):
        return 77

    def arguments(self, launch):
        return launch.specialised.arguments(launch.specialised.binary(self.arch))

    def launcher(self, launch):
        arguments = self.arguments(launch)

        def run(handle, *rest):
            try:
                self._launch(launch, arguments, handle, *rest)
            except AssertionError as error:  # what fails before or in a first launch is made the plain way
                self.known.failures.append(error)
                raise

        return run, launch.specialised

    def _launch(self, launch, arguments, handle, *rest):
        *dims, shared, stream, parameters, extra = rest
        assert handle is launch.specialised and (stream, extra) == (77, 0)
        assert (*dims, shared) == (
            *launch.configuration.grid,
            *launch.configuration.block,
            launch.configuration.shared,
        )
        pointers = (ctypes.c_void_p * len(arguments)).from_address(parameters)
        args = [self._value(one, at, recorded) for one, at, recorded in zip(arguments, pointers, launch.args)]
        with torch._C.DisableTorchFunction():
            launch.specialised.launch(launch.specialised.anchored(args), launch.configuration, tuple(args))
        self.known.launches.append(launch.specialised.name)

    def _value(self, argument, at, recorded):
        content = ctypes.string_at(at, argument.size)
        if isinstance(recorded, MapRef):
            return self._map(content, recorded)
        if isinstance(recorded, AccessorRef):
            return self._accessed(argument.accessor, content, recorded)
        if isinstance(recorded, PointersRef):
            return self._pointers(content, recorded)
        if argument.kind == "struct":
            assert np.asarray(recorded).tobytes() == content
            return np.frombuffer(content, np.uint8)
        (value,) = struct.unpack(f"<{argument.format}", content)
        if argument.kind == "pointer":
            assert (value == 0) == (recorded is None) or isinstance(recorded, Ref)
            return self.known.at(value, argument.dtype or torch.uint8) if value else None
        expected = np.float32(recorded) if argument.kind == "float" and argument.size == 4 else recorded
        assert value == expected or freeze(float(value)) == freeze(float(expected))
        return value

    def _accessed(self, accessor, content, recorded):
        """The tensor that an accessor's bytes describe."""
        assert content[8:] == recorded.content[8:] and len(content) == len(recorded.content)
        address, *extents = struct.unpack(accessor._format, content)
        sizes, strides = extents[: accessor.rank], extents[accessor.rank :]
        return self.known.at(address, accessor.dtype).as_strided(sizes, strides)

    def _pointers(self, content, recorded):
        """Pointers as the bytes have them: to what lies at the addresses."""
        addresses = struct.unpack(f"<{len(content) // 8}Q", content)
        given, rest = addresses[: len(recorded.entries)], addresses[len(recorded.entries) :]
        assert not any(rest) and [one == 0 for one in given] == [one is None for one in recorded.entries]
        return Pointers(tuple(self.known.at(one, torch.uint8) if one else None for one in given), recorded.written)

    def _map(self, content, recorded):
        """A tensor map as the bytes have it: of what lies at the address."""
        found = Simulated.decode(content)
        assert Simulated(found.address, *recorded.description[:-2]) == found
        # a tensor of bytes serves: the simulator goes by the description
        there = self.known.at(found.address + recorded.description.before, torch.uint8)
        return _Anywhere(there, recorded.description, recorded.written)


class _Anywhere(TensorMap):
    """A map whose tensor is all that lies at an address, and not of the shape that the map has."""

    def unfit(self):
        return "" if self.tensor.data_ptr() % 16 == 0 else "an aligned tensor"


@contextmanager
def driver(arch=ARCH):
    """Inside, kernels run in the simulator, and plans are generated code."""
    plans.forget_all()
    with cupyops.simulate(arch), Known() as known:
        Machine.arch, Machine.known, build.machines["cpu"] = arch, known, Machine
        try:
            yield known
            assert not known.failures
        finally:
            del build.machines["cpu"]
            Machine.known = None
            plans.forget_all()
