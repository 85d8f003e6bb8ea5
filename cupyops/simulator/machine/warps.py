"""Instructions of a warp: shuffles, votes, matches, reductions, __syncwarp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import WarpFault
from ..memory import POISON
from .faults import fault
from .group import Group
from .state import State

_FULL = 0xFFFFFFFF
_NOTHING = np.uint32(POISON * 0x01010101)  # what is read of a lane that takes no part


class Warps:
    """Exchange between the lanes of each warp."""

    def __init__(self, state: State) -> None:
        self._state = state

    # --- who takes part ---

    def members(self, group: Group, mask: Any, pc: int) -> Any:
        """The lanes that take part: those named in the mask, each of which is here and names itself.

        Where that is let pass, those that have exited take no part.
        """
        batch = group.batch
        if group.index is None and batch.whole_warps and not isinstance(mask, np.ndarray) and int(mask) == _FULL:
            return mask
        mask = group.spread(mask, np.uint32)
        warp = group.get("warp")
        if self._state.exited_lanes:
            mask = mask & self._state.live_lanes()[warp]
        absent = mask & ~group.lanes_present()[warp]
        if absent.any():
            raise absent_lanes(self._state, group, mask, absent, pc)
        outside = ((mask >> group.get("laneid")) & np.uint32(1)) == 0
        if outside.any():
            what = "a warp-wide instruction is executed by a lane that its mask does not name"
            first = int(mask[int(np.argmax(outside))])
            raise fault(WarpFault, self._state.listing, group, outside, what, pc, detail=f"mask {first:#010x}")
        return mask

    def check_whole(self, group: Group, lanes: int, pc: int) -> None:
        """An .aligned instruction is executed by whole warps, or warpgroups of 128."""
        if group.index is None and group.batch.threads_per_block % lanes == 0:
            return
        local = group.threads % group.batch.threads_per_block
        starts = local[::lanes]
        whole = group.size % lanes == 0 and bool((starts % lanes == 0).all())
        if not whole or not bool((local[lanes - 1 :: lanes] == starts + lanes - 1).all()):
            what = f"an instruction of all {lanes} lanes is executed by some of them only"
            raise fault(WarpFault, self._state.listing, group, np.True_, what, pc)

    # --- the instructions ---

    def shuffle(
        self, group: Group, mode: str, value: Any, lane: Any, clamp: Any, mask: Any, pc: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """shfl.sync: (the value of another lane, whether that lane is within the segment).

        That of a lane which takes no part is a pattern, for PTX does not say what it is.
        """
        mask = self.members(group, mask, pc)
        value = group.spread(value)
        if group.index is None and group.batch.whole_warps and not isinstance(mask, np.ndarray):
            source, inside = self._sources(group, mode, lane, clamp)
            return value[source], inside
        other, inside = _source_lane(mode, group.get("laneid").astype(np.int64), lane, clamp)
        return self._of_lanes(group, value, other, mask, _NOTHING), inside

    def shuffle_flags(
        self, group: Group, mode: str, undefined: np.ndarray, value: Any, lane: Any, clamp: Any, mask: Any, pc: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Shuffle, and mark what is read as undefined: of a lane outside of the mask, or as it is in that lane."""
        result, inside = self.shuffle(group, mode, value, lane, clamp, mask, pc)
        other, _ = _source_lane(mode, group.get("laneid").astype(np.int64), lane, clamp)
        flags = self._of_lanes(group, undefined, other, group.spread(mask, np.uint32), np.True_)
        if self._state.exited_lanes:  # code that reads of lanes that have exited is to be run as it is
            flags &= (self._state.live_lanes()[group.get("warp")] >> other.astype(np.uint32)) & np.uint32(1) != 0
        return result, inside, flags

    def _of_lanes(self, group: Group, value: np.ndarray, other: np.ndarray, mask: Any, nothing: Any) -> np.ndarray:
        """The values of other lanes of each warp; `nothing` of those that are not named in the mask, or not here."""
        slot = group.get("slot")
        lanes = np.full(group.batch.warps * 32, nothing, value.dtype)
        lanes[slot] = value
        is_named = (mask >> other.astype(np.uint32)) & np.uint32(1) != 0
        return np.where(is_named, lanes[slot - group.get("laneid").astype(np.int64) + other], nothing)

    def _sources(self, group: Group, mode: str, lane: Any, clamp: Any) -> tuple[np.ndarray, np.ndarray]:
        """Sources of a whole batch's shuffle: (the thread of each value, whether it is within the segment)."""
        key = None if isinstance(lane, np.ndarray) or isinstance(clamp, np.ndarray) else (mode, int(lane), int(clamp))
        if key in group.batch.shuffles:
            return group.batch.shuffles[key]
        own = group.get("laneid").astype(np.int64)
        other, inside = _source_lane(mode, own, lane, clamp)
        found = group.threads - own + other, inside
        if key is not None:
            group.batch.shuffles[key] = found
        return found

    def vote(self, group: Group, mode: str, predicate: Any, mask: Any, pc: int) -> np.ndarray:
        """vote.sync."""
        mask = self.members(group, mask, pc)
        flags = np.zeros(group.batch.warps * 32, np.bool_)
        flags[group.get("slot")] = predicate
        ballot = np.packbits(flags, bitorder="little").view(np.uint32)[group.get("warp")] & mask
        if mode == "ballot":
            return ballot
        if mode == "any":
            return ballot != 0
        return ballot == mask if mode == "all" else (ballot == 0) | (ballot == mask)

    def active(self, group: Group) -> np.ndarray:
        """activemask."""
        return group.lanes_present()[group.get("warp")]

    def elect(self, group: Group, mask: Any, pc: int) -> tuple[np.ndarray, np.ndarray]:
        """elect.sync: the lowest lane of the mask leads."""
        mask = self.members(group, mask, pc)
        mask = group.spread(mask, np.uint32)
        lowest = np.log2((mask & (~mask + np.uint32(1))).astype(np.float64)).astype(np.uint32)
        return lowest, group.get("laneid") == lowest

    def match(self, group: Group, mode: str, value: Any, mask: Any, pc: int) -> tuple[np.ndarray, np.ndarray]:
        """match.sync: (the lanes that hold the same value, whether all do)."""
        mask = self.members(group, mask, pc)
        value, mask = group.spread(value), group.spread(mask, np.uint32)
        slot, warps = group.get("slot"), group.batch.warps
        values = np.zeros(warps * 32, value.dtype)
        present = np.zeros(warps * 32, np.bool_)
        values[slot], present[slot] = value, True
        rows, here = values.reshape(warps, 32), present.reshape(warps, 32)
        same = (rows[:, :, None] == rows[:, None, :]) & here[:, None, :]
        lanes = np.packbits(same, axis=2, bitorder="little").view(np.uint32).reshape(-1)[slot] & mask
        if mode == "any":
            return lanes, lanes == mask
        agree = lanes == mask
        return np.where(agree, lanes, np.uint32(0)), agree

    def reduce(
        self, group: Group, operation: str, value: Any, mask: Any, ignores_nan: bool, absolute: bool, pc: int
    ) -> np.ndarray:
        """redux.sync, over the lanes that name the same mask."""
        mask = self.members(group, mask, pc)
        value, mask = group.spread(value), group.spread(mask, np.uint32)
        if absolute:
            value = np.abs(value)
        # lanes with one mask belong together; a warp may hold several such sets
        key = group.get("warp").astype(np.uint64) << np.uint64(32) | mask
        _, number = np.unique(key, return_inverse=True)
        if value.dtype.kind == "f":
            combine: Any = {"min": np.fmin, "max": np.fmax} if ignores_nan else {"min": np.minimum, "max": np.maximum}
            result = np.full(
                int(number.max()) + 1,
                np.nan if ignores_nan else {"min": np.inf, "max": -np.inf}[operation],
                value.dtype,
            )
            combine[operation].at(result, number, value)
            return result[number]
        ufunc: Any = {
            "add": np.add, "min": np.minimum, "max": np.maximum,
            "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
        }[operation]  # fmt: skip
        info = np.iinfo(value.dtype)
        neutral = {"min": info.max, "max": info.min, "and": -1 if info.min else info.max}.get(operation, 0)
        result = np.full(int(number.max()) + 1, neutral, value.dtype)
        ufunc.at(result, number, value)
        return result[number]

    def sync(self, group: Group, mask: Any, pc: int) -> None:
        """bar.warp.sync: orders the memory accesses of the lanes that the mask names."""
        state, mask = self._state, group.spread(self.members(group, mask, pc), np.uint32)
        warp, now = group.get("warp"), state.now(pc)
        partly = (state.live_lanes()[warp] & ~mask) != 0
        whole = np.unique(warp[~partly])
        apart = np.unique(warp[partly].astype(np.uint64) << np.uint64(32) | mask[partly])
        for one in apart.tolist():
            of_warp, of_mask = one >> 32, one & _FULL
            lanes = np.array([lane for lane in range(32) if of_mask >> lane & 1])
            state.lane_epochs.meet(of_warp, lanes, int(state.warp_epoch[of_warp]) + 1, int(state.warp_epoch[of_warp]))
            state.lane_times.meet(of_warp, lanes, now + 1, int(state.warp_synced[of_warp]) + 1)
        state.lane_epochs.meet_whole(whole)
        state.lane_times.meet_whole(whole)
        state.warp_epoch = state.warp_epoch.copy()
        state.warp_epoch[np.unique(warp)] += 1
        state.warp_synced[whole] = now
        if state.knowledge is not None:
            state.knowledge.meet_in_warps(group, mask)


def lanes_alike(group: Group, mask: Any) -> np.ndarray:
    """Bits for each thread of the group: one for each lane of its warp that is in the group and names the same mask."""
    warp = group.get("warp")
    if not isinstance(mask, np.ndarray) or not mask.ndim or bool((mask == mask[0]).all()):
        return group.lanes_present()[warp]
    _, number = np.unique(warp.astype(np.uint64) << np.uint64(32) | mask, return_inverse=True)
    here = np.zeros(int(number.max()) + 1, np.uint32)
    np.bitwise_or.at(here, number, np.uint32(1) << group.get("laneid"))
    return here[number]


def absent_lanes(
    state: State,
    group: Group,
    mask: np.ndarray,
    absent: np.ndarray,
    pc: int,
    places: Sequence[tuple[int, np.ndarray]] = (),
) -> WarpFault:
    """The error where masks name lanes that are not in the group: bits of `absent`. `places`: which threads are where."""
    gone = ~state.live_lanes()[group.get("warp")]
    elsewhere = absent & ~gone
    bad, why = (elsewhere, "are elsewhere") if elsewhere.any() else (absent & gone, "have exited or do not exist")
    first = int(np.argmax(bad != 0))
    lanes = [lane for lane in range(32) if int(bad[first]) >> lane & 1]
    what = f"a warp-wide instruction names lanes that {why}"
    detail = f"mask {int(mask[first]):#010x}; lanes {_listed(lanes)} {why}"
    lines = [str(fault(WarpFault, state.listing, group, bad != 0, what, pc, detail=detail))]
    slots = group.get("warp")[first] * 32 + np.array(lanes)
    slot_of = group.batch.per_thread["slot"]
    for place, threads in sorted(places, key=lambda pair: pair[0]):
        there = slot_of[threads][np.isin(slot_of[threads], slots)] % 32
        if len(there):
            lines += [f"lanes {_listed(there.tolist())} wait at", *state.listing.describe(place)]
    return WarpFault("\n".join(lines))


def _listed(lanes: list[int]) -> str:
    return ", ".join(map(str, lanes[:6])) + (f" and {len(lanes) - 6} more" if len(lanes) > 6 else "")


def _source_lane(mode: str, own: np.ndarray, lane: Any, clamp: Any) -> tuple[np.ndarray, np.ndarray]:
    """(the lane that a shuffle reads, its own where that is outside the segment; whether it is inside)."""
    other, clamp = np.asarray(lane).astype(np.int64) & 31, np.asarray(clamp).astype(np.int64)
    bound, segment = clamp & 31, (clamp >> 8) & 31
    highest = (own & segment) | (bound & ~segment)
    if mode == "up":
        source = own - other
        inside = source >= highest
    else:
        source = {"down": own + other, "bfly": own ^ other, "idx": (own & segment) | (other & ~segment)}[mode]
        inside = source <= highest
    return np.where(inside, source, own), inside
