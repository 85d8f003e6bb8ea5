"""The state of a launch: sizes, memory, and what the blocks of the batch under way have come to."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..errors import Race
from ..memory import POISON, SHARED_BASE, Memory, Region
from ..profile import Profile
from ..translate.function import Compiled
from ..translate.layout import Extent
from .faults import Listing, fault
from .group import Batch, Group, lane_bits
from .knowledge import Knowledge
from .lane_order import LaneOrder
from .warp_order import Past, WarpOrder

_RANK_SHIFT = 24  # shared addresses of a cluster: the offset below, the rank of the block from here on
_RANK_MASK = 0xFF
_PC_BITS = 20
_UNORDERED = frozenset(("relaxed", "release"))
PC_MASK = (1 << _PC_BITS) - 1
EPOCH_SHIFT = 32  # of a moment in shared memory: the block's epoch from here on, the warp's below


class Reach(NamedTuple):
    """An access to another block's shared memory."""

    group: Group
    lanes: np.ndarray  # of the group
    verb: str
    pc: int


class Gaps:
    """Gaps between the variables of a space, which belong to none of them."""

    def __init__(self, places: tuple[Extent, ...], inside: np.ndarray) -> None:
        size = len(inside)
        # the extent of dynamic memory is known with the launch
        self._places = [place if place.high > place.low else Extent("", place.low, size) for place in places]
        self.inside = inside  # whether it is such, by byte

    @classmethod
    def between(cls, places: tuple[Extent, ...], size: int, dynamic: int = 0) -> Gaps | None:
        """Return the gaps, or None. `dynamic`: bytes at the end that belong to the kernel as a whole."""
        inside = np.ones(size, np.bool_)
        for place in places:
            inside[place.low : place.high] = False
        inside[size - dynamic :] = False
        return cls(places, inside) if len(places) > 1 or inside.any() else None

    def nearest(self, offset: int) -> Extent:
        """The variable that an access there was meant for: the one that ends nearest before it, or begins behind."""
        return min(self._places, key=lambda place: max(place.low - offset, offset + 1 - place.high))


class State:
    """Plain data that the units of the machine share."""

    batch: Batch
    shared_memory: Region  # of all blocks of the batch, one after the other
    local_memory: Region  # of all its threads
    local_written: np.ndarray  # which bytes of it hold a value; empty where that is not asked
    registers: list[Any]  # an array over all threads, or a scalar where they agree; by number
    epoch: np.ndarray  # by block: how often its threads, or some warps of it, have met
    met: np.ndarray  # the epoch in which all threads of the block last met, by block
    least_epoch: int  # in which all threads of any block last met
    latest_epoch: int  # of any block
    order: WarpOrder  # among the warps of a block since then
    relaxed: np.ndarray  # whether threads of the block have met others by what orders nothing without a fence, by block
    has_met: np.ndarray  # whether the block's cluster has met at all
    cluster_epoch: np.ndarray  # the epoch in which the block's cluster last met, by block
    warp_epoch: np.ndarray  # by warp; never changed, but replaced, so that an access can hold on to what it was
    lane_epochs: LaneOrder  # where some lanes of a warp have met without the others, by epochs of the warp
    lane_times: LaneOrder  # and by time
    synced: np.ndarray  # when the block's threads last came through a barrier (`now`), by block
    warp_synced: np.ndarray  # when the lanes of a warp last met by __syncwarp, by warp
    exited: np.ndarray  # by thread
    knowledge: Knowledge | None  # of what goes on beside the threads; None where nothing does
    fenced_at: np.ndarray  # by thread: when it last ran fence.proxy.async
    reached: dict[int, Reach]  # by block the last access of another one to it since its cluster met

    def __init__(
        self,
        code: Compiled,
        memory: Memory,
        listing: Listing,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        cluster: tuple[int, int, int],
        dynamic_shared: int,
        parameters: np.ndarray,
        watched: set[int],
        check: bool,
        profile: Profile | None,
        exited_lanes: bool = False,
        cooperative: bool = False,
    ) -> None:
        self.code, self.memory, self.listing = code, memory, listing
        self.grid, self.block, self.cluster = grid, block, cluster
        self.cluster_size = self.cluster[0] * self.cluster[1] * self.cluster[2]
        self.rank_unit = 1 << _RANK_SHIFT
        self.dynamic_shared = dynamic_shared
        self.static_shared = code.layout.static_shared
        self.shared_bytes = code.layout.shared_bytes + dynamic_shared
        self.shared_gaps = Gaps.between(code.layout.shared_places, self.shared_bytes, dynamic_shared)
        self.local_gaps = Gaps.between(code.layout.local_places, code.layout.local_bytes)
        self.shared_stride = max(16, -(-self.shared_bytes // 16) * 16)
        self.local_bytes = code.layout.local_bytes
        self.parameters = Region(parameters)
        self.watched = watched  # numbers of the allocations that the kernel may write
        self.check = check
        self.profile = profile
        self.exited_lanes = exited_lanes  # whether masks may name lanes that have exited
        self.cooperative = cooperative  # whether all blocks run at the same time
        self.clock = 0  # instructions issued so far
        self.thread_instructions = 0
        self.progressed = False  # something has happened that others may wait for
        self.spinning = False  # the last step found out that it has to wait
        self.idle = 0  # how often mbarriers were asked in vain since anything happened

    def begin(self, batch: Batch) -> None:
        """Fresh memory and registers for the threads of a batch."""
        self.batch = batch
        self.shared_memory = Region(np.full(batch.blocks * self.shared_stride, POISON, np.uint8))
        self.local_memory = Region(np.full(batch.threads * self.local_bytes, POISON, np.uint8))
        self.local_written = np.zeros(len(self.local_memory.buffer) if self.code.undefined else 0, np.bool_)
        self.epoch, self.met = (np.zeros(batch.blocks, np.int64) for _ in range(2))
        self._note_epochs()
        self.order = WarpOrder(batch)
        self.relaxed = np.zeros(batch.blocks, np.bool_)
        self.cluster_epoch = np.zeros(batch.blocks, np.int64)
        self.has_met = np.zeros(batch.blocks, np.bool_)
        self.warp_epoch = np.zeros(batch.warps, np.int64)
        # before this batch nothing has happened that its threads must be ordered with
        self.synced = np.full(batch.blocks, self.now(PC_MASK), np.int64)
        self.warp_synced = np.zeros(batch.warps, np.int64)
        self.lane_epochs, self.lane_times = LaneOrder(), LaneOrder()
        self.exited = np.zeros(batch.threads, np.bool_)
        self.reached = {}
        self.knowledge = Knowledge(batch, self.cluster_size) if self.code.beside else None
        self.fenced_at = np.zeros(batch.threads, np.int64)
        self.idle = 0
        dtypes = self.code.registers
        self.registers = [None if dtype is None else np.zeros(batch.threads, dtype) for dtype in dtypes]

    def live_lanes(self) -> np.ndarray:
        """Bits of each warp: one for each lane that has not exited."""
        return lane_bits(self.batch, self.batch.per_thread["slot"][~self.exited])

    def now(self, pc: int) -> int:
        """A number that only grows: instructions issued, then the one within the stretch that was issued at once."""
        return self.clock << _PC_BITS | pc

    def unordered_in_warp(self, group: Group, other: np.ndarray, time: np.ndarray) -> np.ndarray:
        """Mask of lanes that have not met another one of their warp (by its thread; from 1024 on several) since `time`."""
        warp = group.get("warp")
        found = time > self.warp_synced.take(warp)
        if self.lane_times and found.any():
            warps, lanes = (np.broadcast_to(one, time.shape) for one in (warp, group.get("laneid")))
            partly = self.lane_times.partial(warps)
            others = np.where(other < 1024, other % 32, -1)
            found = np.where(partly, self.lane_times.unordered(warps, lanes, others, time), found)
        return found

    def pass_barrier(self, blocks: Any) -> None:
        """Begin a new epoch of blocks that have come through a barrier. `blocks`: a mask, or a slice."""
        self.epoch[blocks] += 1
        self.met[blocks] = self.epoch[blocks]
        self.synced[blocks] = self.now(PC_MASK)
        self._note_epochs()

    def _note_epochs(self) -> None:
        self.least_epoch, self.latest_epoch = int(self.met.min()), int(self.epoch.max())
        self._epochs: tuple[Group | None, np.ndarray, np.ndarray] = (None, self.epoch, self.met)

    def epochs(self, group: Group) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the moments at which the epoch of each thread's block began, and at which all its threads last met."""
        if self._epochs[0] is not group:
            block = group.get("block")
            epoch = met = (self.epoch << EPOCH_SHIFT).take(block)[None]
            if self.latest_epoch != self.least_epoch:
                met = (self.met << EPOCH_SHIFT).take(block)[None]
            self._epochs = group, epoch, met
        return self._epochs[1:]

    # --- order among the warps of a block ---

    def end_past(self, threads: np.ndarray, pc: int) -> Past:
        """Return what lies behind these threads; what they do next is of a later epoch."""
        past = self.order.past(threads, self.epoch, self.now(pc))
        self.epoch[past.blocks] += 1
        self._note_epochs()
        return past

    def learn(self, threads: np.ndarray, until: np.ndarray) -> None:
        """Order what these threads do next behind the past that `until` has of each block."""
        self.epoch[np.unique(self.batch.per_thread["block"][threads])] += 1
        self._note_epochs()
        self.order.learn(threads, until, self.epoch, self.now(PC_MASK))

    def acquire(self, threads: np.ndarray) -> None:
        """Order what these threads do next behind all of their blocks that have run a fence."""
        news = self.order.news(threads)
        if news is not None:
            self.learn(threads, news)

    def meet(self, group: Group, pc: int) -> bool:
        """Return True if an atomic or a flag orders what comes after it; one that says `.relaxed` needs a fence for that."""
        if _UNORDERED.isdisjoint(self.listing.instructions[pc].modifiers):
            self.acquire(group.threads)
            return True
        self.relaxed[group.get("block")] = True
        return False

    def passed_cluster(self, block: int) -> None:
        """The blocks of this one's cluster have met."""
        first = block // self.cluster_size * self.cluster_size
        cluster = slice(first, first + self.cluster_size)
        self.pass_barrier(cluster)
        self.has_met[cluster] = True
        self.cluster_epoch[cluster] = self.epoch[cluster]
        for one in range(first, first + self.cluster_size):
            self.reached.pop(one, None)

    def has_exited(self, block: int) -> bool:
        """Return True if all threads of a block have exited."""
        size = self.batch.threads_per_block
        return bool(self.exited[block * size : (block + 1) * size].all())

    def check_outlived(self) -> None:
        """Check that no block has just exited to whose shared memory others had access since its cluster met."""
        for block, reach in self.reached.items():
            if self.has_exited(block):
                raise self.outlived(reach)

    def outlived(self, reach: Reach) -> Race:
        """The error for an access to the shared memory of a block that exits, or has exited, with nothing in between."""
        what = (
            f"{reach.verb} of another block's shared memory, with no meeting of the cluster before that block exits: its "
            "memory may be gone"
        )
        return fault(Race, self.listing, reach.group, reach.lanes, what, reach.pc)

    # --- shared addresses in a cluster ---

    def shared_start(self, group: Group, address: np.ndarray) -> np.ndarray:
        """Start, within the batch, of the shared memory that each address means."""
        own = group.get("block")
        if self.cluster_size == 1:
            return group.once("shared start", lambda: own * self.shared_stride)
        first = own // self.cluster_size * self.cluster_size
        return (first + self.named_rank(address)) * self.shared_stride

    def named_rank(self, address: np.ndarray) -> np.ndarray:
        """The rank of the block whose memory a shared address means."""
        return (address >> _RANK_SHIFT) & _RANK_MASK

    def map_to_rank(self, address: Any, rank: Any, dtype: Any) -> Any:
        """The shared address of the same variable in the block of that rank."""
        offset = address & dtype(self.rank_unit - 1)
        base = dtype(SHARED_BASE) if dtype is np.uint64 else dtype(0)
        if self.cluster_size == 1:
            return base + offset + rank.astype(dtype) * dtype(0)
        return base + offset + (rank.astype(dtype) << dtype(_RANK_SHIFT))

    def own_address(self, group: Group, address: Any, dtype: Any) -> Any:
        """The shared address of a variable in each thread's own block."""
        return address + group.once(
            f"own {dtype.__name__}", lambda: group.get("cluster_ctarank").astype(dtype) << dtype(_RANK_SHIFT)
        )

    def rank_of(self, group: Group, address: Any) -> np.ndarray:
        """The rank of the block that a shared address belongs to."""
        return self.named_rank(group.spread(address).astype(np.uint64)).astype(np.uint32)
