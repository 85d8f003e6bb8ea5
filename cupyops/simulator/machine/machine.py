"""One launch, from its first block to its last: the units that generated code calls, and the batches of blocks."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import Uninitialized
from ..translate.function import CompiledBlock
from .atomics import Atomics
from .bulk import Bulk
from .copies import Copies
from .faults import fault
from .global_shadow import GlobalShadow
from .group import Batch, Group
from .matrices import Matrices
from .mbarriers import MBarriers
from .meetings import Meetings, Prompter
from .register_pool import RegisterPool
from .runtime import Runtime
from .scheduler import Scheduler
from .shared_shadow import SharedShadow
from .spaces import Spaces
from .state import State
from .warps import Warps

_THREADS_PER_BATCH = 16384  # beyond this the arrays leave the cache


class Machine:
    """Machine that the generated functions get as `m`."""

    scheduler: Scheduler  # of the batch under way
    warps: Warps | Prompter
    mbarriers: MBarriers
    copies: Copies
    bulk: Bulk
    registers: list[Any]

    def __init__(self, state: State, *, seed: int | None, max_steps: int, output: Callable[[str], Any]) -> None:
        self._state = state
        self._chooser = random.Random(seed) if seed is not None else None
        self.seed = seed or 0  # by which the errors of approximations are drawn
        self._max_steps = max_steps
        layout = state.code.layout
        self._shadow = GlobalShadow(state, layout.global_granule) if state.check else None
        self._spaces = Spaces.of(state, self._shadow)
        self.global_space, self.shared_space = self._spaces.global_, self._spaces.shared
        self.cluster_space = self._spaces.cluster
        self.local_space, self.parameter_space = self._spaces.local, self._spaces.parameters
        self.generic_space = self._spaces.generic
        self.warps = warps = self._all_warps = Warps(state)
        self._meetings = Meetings(state, warps, self._run_prompted)
        self.atomics = Atomics(state, self._spaces, self._chooser)
        self.matrices = Matrices(state, self._spaces, warps)
        self.runtime = Runtime(state, self._spaces, output)
        self.map_to_rank, self.rank_of, self.own_address = state.map_to_rank, state.rank_of, state.own_address
        self.special = _special(state)
        if state.cooperative:
            workspace = state.memory.allocate(np.zeros(64, np.uint8), "the grid's barrier")
            state.watched.add(workspace.number)
            self.special |= {"envreg1": workspace.base >> 32, "envreg2": workspace.base & 0xFFFFFFFF}
        self.steps = 0

    # --- running ---

    def run(self, progress: Callable[[int, int], Any] | None = None) -> None:
        """All blocks of the grid, batch after batch. `progress` is told (blocks done, blocks in all)."""
        state = self._state
        order = self._block_order()
        threads = state.block[0] * state.block[1] * state.block[2]
        size = max(1, _THREADS_PER_BATCH // (threads * state.cluster_size)) * state.cluster_size
        if state.cooperative:
            size = len(order)  # blocks that wait for each other run side by side
        with np.errstate(all="ignore"):
            for start in range(0, len(order), size):
                self._run_batch(order[start : start + size])
                if progress is not None:
                    progress(min(start + size, len(order)), len(order))

    def _block_order(self) -> np.ndarray:
        """The numbers of all blocks: those of a cluster together, by rank; shuffled where a seed says so."""
        state = self._state
        x, y, z = state.grid
        number = np.arange(x * y * z)
        if state.cluster_size > 1:
            at = (number % x, number // x % y, number // (x * y))
            cluster, rank = np.zeros_like(number), np.zeros_like(number)
            for position, extent, size in reversed(list(zip(at, state.grid, state.cluster))):
                cluster = cluster * (extent // size) + position // size
                rank = rank * size + position % size
            number = number[np.lexsort((rank, cluster))]
        if self._chooser is None:
            return number
        clusters = number.reshape(-1, state.cluster_size)
        return clusters[np.random.default_rng(self._chooser.randrange(2**32)).permutation(len(clusters))].reshape(-1)

    def _run_batch(self, blocks: np.ndarray) -> None:
        state = self._state
        batch = Batch(state.grid, state.block, state.cluster, blocks)
        state.begin(batch)
        self.registers = state.registers
        self._undefined = {one: np.full(batch.threads, flag) for one, flag in state.code.undefined.items()}
        has_shadow = state.check and state.shared_bytes > 0
        shadow = SharedShadow(state, state.code.layout.granule) if has_shadow else None
        self.shared_space.shadow = self.cluster_space.shadow = shadow
        self.mbarriers = MBarriers(state, self.shared_space)
        self.copies = Copies(state, self._spaces, self.mbarriers)
        self.bulk = Bulk(state, self._spaces, self.atomics, self.mbarriers, self._chooser)
        self.matrices.begin()
        self.register_pool = RegisterPool(state, self._all_warps)
        self.scheduler = Scheduler(
            state,
            batch,
            self._shadow,
            self._run_block,
            self._meetings,
            self._max_steps,
            self._chooser,
            self.bulk.leave,
            self.mbarriers.describe,
        )
        self.scheduler.run()
        self.bulk.finish()
        self.register_pool.finish(Group(batch, None, batch.threads))
        self.steps += self.scheduler.steps

    def flags(self, numbers: tuple[int, ...], index: Any) -> list[np.ndarray]:
        """Masks of the threads for which registers are undefined."""
        found = [self._undefined[number] for number in numbers]
        return found if index is None else [one[index] for one in found]

    def set_flags(self, number: int, index: Any, flags: Any) -> None:
        """Note where a register is undefined."""
        self._undefined[number][slice(None) if index is None else index] = flags

    def check_defined(self, group: Group, undefined: Any, pc: int, verb: str) -> None:
        """Check that no value is undefined which these threads use with a lasting effect."""
        if self._state.check and np.any(undefined):
            what = f"{verb} a value that nothing has written"
            detail = (
                "it comes from a variable without a value, from local memory, or by a shuffle from outside of the mask"
            )
            raise fault(Uninitialized, self._state.listing, group, undefined, what, pc, detail=detail)

    def _run_block(self, block: CompiledBlock, group: Group) -> Any:
        self._count(block, group)
        return block.function(self, group)

    def _run_prompted(self, block: CompiledBlock, group: Group, prompter: Prompter) -> Any:
        """Run a block with the answers of exchanges that have taken place already; count it if they are all."""
        prompted = copy.copy(self)
        prompted.warps = prompter
        clock = self._state.clock
        self._state.clock += block.size  # as in `_count`: what it does is later than what was done so far
        try:
            result = block.function(prompted, group)
        finally:
            self._state.clock = clock
        self._count(block, group)
        return result

    def _count(self, block: CompiledBlock, group: Group) -> None:
        state = self._state
        state.clock += block.size
        state.thread_instructions += block.size * group.size
        if state.profile is not None:
            state.profile.block(block, group)

    # --- what generated code asks for directly ---

    @property
    def clock(self) -> int:
        """Instructions issued so far."""
        return self._state.clock

    def parameter(self, offset: int, dtype: Any, size: int) -> Any:
        """One value from the kernel's parameters."""
        return self._state.parameters.buffer[offset : offset + size].view(dtype)[0]

    def fence(self, group: Group, pc: int, of_block: bool = False, releases: bool = False) -> None:
        """Earlier accesses of these threads are before what they do next, for their block, or for other blocks too.

        `releases`: by a store or an atomic that says so, which orders nothing that comes after it.
        """
        if not of_block:
            self.scheduler.barriers.fenced[group.get("block")] = True
        if self._shadow is not None:
            if not releases and self._state.relaxed[group.get("block")].any():
                self._state.acquire(group.threads)
            past = self._state.end_past(group.threads, pc)
            self._state.order.publish(group.threads, past)
            if not of_block:
                self._shadow.fence(group, pc, past, releases)

    def fence_proxy(self, group: Group, pc: int) -> None:
        """fence.proxy.async: what these threads know to be written is there for bulk copies and matrix products."""
        self._state.fenced_at[group.threads] = self._state.now(pc)

    def lane_mask(self, relation: str, lane: np.ndarray) -> np.ndarray:
        """%lanemask_eq and the like."""
        equal = np.uint32(1) << lane
        below = equal - np.uint32(1)
        return {"eq": equal, "lt": below, "le": below | equal, "gt": ~(below | equal), "ge": ~below}[relation]


def _special(state: State) -> dict[str, int]:
    """Special registers with one value in all threads."""
    special = {"WARP_SZ": 32, "smid": 0, "nsmid": 1, "gridid": 0, "cluster_nctarank": state.cluster_size}
    special |= {f"envreg{number}": 0 for number in range(32)}
    special["nwarpid"] = -(-state.block[0] * state.block[1] * state.block[2] // 32)
    special["dynamic_smem_size"] = state.dynamic_shared
    special["total_smem_size"] = special["aggr_smem_size"] = state.static_shared + state.dynamic_shared
    special["is_explicit_cluster"] = int(state.cluster_size > 1)
    clusters = [extent // size for extent, size in zip(state.grid, state.cluster)]
    families = {"ntid": state.block, "nctaid": state.grid, "cluster_nctaid": state.cluster, "nclusterid": clusters}
    for name, extents in families.items():
        special |= {f"{name}_{axis}": extent for axis, extent in zip("xyz", extents)}
    return special
