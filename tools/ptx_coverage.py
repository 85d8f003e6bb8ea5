"""The table of docs/simulator.md: what PTX 8.x has, and what of it the simulator covers.

One form of each instruction is translated, as a kernel of its own. `python tools/ptx_coverage.py` prints the table,
`--write` puts it into the page.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cupyops.simulator import InvalidPtx, Program, UnsupportedInstruction

PAGE = Path(__file__).parents[1] / "docs" / "simulator.md"
BEGIN, END = "<!-- PTX: begin (tools/ptx_coverage.py --write) -->", "<!-- PTX: end -->"

# family (as the manual's chapters) -> the instructions, by the name that the table gives them where it is not the opcode
FORMS = {
    "integers": """
        add.s32 %r1, %r2, %r3 | sub.s32 %r1, %r2, %r3 | mul.lo.s32 %r1, %r2, %r3 | mad.lo.s32 %r1, %r2, %r3, %r4
        mul24.lo.u32 %r1, %r2, %r3 | mad24.lo.u32 %r1, %r2, %r3, %r4 | sad.u32 %r1, %r2, %r3, %r4 | div.s32 %r1, %r2, %r3
        rem.s32 %r1, %r2, %r3 | abs.s32 %r1, %r2 | neg.s32 %r1, %r2 | min.s32 %r1, %r2, %r3 | max.s32 %r1, %r2, %r3
        popc.b32 %r1, %r2 | clz.b32 %r1, %r2 | bfind.u32 %r1, %r2 | fns.b32 %r1, %r2, %r3, %r4 | brev.b32 %r1, %r2
        bfe.u32 %r1, %r2, %r3, %r4 | bfi.b32 %r1, %r2, %r3, %r4, %r5 | szext.wrap.u32 %r1, %r2, %r3
        bmsk.wrap.b32 %r1, %r2, %r3 | dp4a.u32.u32 %r1, %r2, %r3, %r4 | dp2a.lo.u32.u32 %r1, %r2, %r3, %r4
        addc, subc, madc: add.cc.u32 %r1, %r2, %r3; addc.u32 %r4, %r2, %r3; subc.u32 %r4, %r2, %r3;
            madc.lo.u32 %r5, %r1, %r2, %r3
    """,
    "floats": """
        testp.finite.f32 %p1, %f1 | copysign.f32 %f1, %f2, %f3 | add.rn.f32 %f1, %f2, %f3 | sub.rn.f64 %d1, %d2, %d3
        mul.rz.f32 %f1, %f2, %f3 | fma.rn.f64 %d1, %d2, %d3, %d4 | mad.rn.f32 %f1, %f2, %f3, %f4 | div.rn.f32 %f1, %f2, %f3
        div.full.f32 %f1, %f2, %f3 | abs.f32 %f1, %f2 | neg.f32 %f1, %f2 | min.NaN.f32 %f1, %f2, %f3 | max.f64 %d1, %d2, %d3
        rcp.approx.ftz.f64 %d1, %d2 | sqrt.rn.f32 %f1, %f2 | rsqrt.approx.f32 %f1, %f2 | sin.approx.f32 %f1, %f2
        cos.approx.f32 %f1, %f2 | lg2.approx.f32 %f1, %f2 | ex2.approx.f32 %f1, %f2 | tanh.approx.f32 %f1, %f2
        f32x2: add.rn.f32x2 %rd1, %rd2, %rd3
        f16, bf16: fma.rn.bf16x2 %r1, %r2, %r3, %r4; tanh.approx.f16 %h1, %h2; ex2.approx.f16 %h1, %h2
        mixed precision: add.f32.bf16 %f1, %h1, %f2
    """,
    "comparisons, logic, shifts": """
        set.lt.u32.f32 %r1, %f1, %f2 | setp.lt.s32 %p1, %r1, %r2 | selp.b32 %r1, %r2, %r3, %p1
        slct.s32.s32 %r1, %r2, %r3, %r4
        and.b32 %r1, %r2, %r3 | or.b32 %r1, %r2, %r3 | xor.b32 %r1, %r2, %r3 | not.b32 %r1, %r2 | cnot.b32 %r1, %r2
        lop3.b32 %r1, %r2, %r3, %r4, 0xe8 | shf.l.wrap.b32 %r1, %r2, %r3, %r4 | shl.b32 %r1, %r2, %r3 | shr.u32 %r1, %r2, %r3
    """,
    "moves and conversions": """
        mov.b32 %r1, %r2 | prmt.b32 %r1, %r2, %r3, %r4 | cvt.rn.f16.f32 %h1, %f1 | cvt.pack.sat.s16.s32 %r1, %r2, %r3
        cvt to fp8: cvt.rn.satfinite.e4m3x2.f32 %h1, %f1, %f2
        cvt to fp6, fp4: cvt.rn.satfinite.e2m1x2.f32 %b1, %f1, %f2
        cvt.rs: cvt.rs.f16x2.f32 %r1, %f1, %f2, %r3
        cvta.to.global.u64 %rd1, %rd2 | isspacep.shared %p1, %rd1 | mapa.shared::cluster.u32 %r1, %r2, %r3
        getctarank.u64 %r1, %rd1 | createpolicy.fractional.L2::evict_last.b64 %rd1, 1.0
    """,
    "loads and stores": """
        ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1] | ld.global.nc.b32 %r1, [%rd1] | ldu.global.b32 %r1, [%rd1]
        st.shared.b32 [%r1], %r2 | st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1], %r2, [%r3]
        st.bulk.weak.shared::cta [%rd1], %rd2, 0 | prefetch.global.L2 [%rd1] | prefetchu.L1 [%rd1]
        applypriority.global.L2::evict_normal [%rd1], 128 | discard.global.L2 [%rd1], 128
        multimem.ld_reduce.global.add.f32 %f1, [%rd1] | multimem.st.global.f32 [%rd1], %f1
    """,
    "asynchronous copies": """
        cp.async.ca.shared.global [%r1], [%rd1], 16 | cp.async.mbarrier.arrive.shared.b64 [%r1] | cp.async.commit_group
        cp.async.wait_group 0 | cp.async.bulk.commit_group | cp.async.bulk.wait_group.read 0
        cp.async.bulk .cp_mask: cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%rd1], [%r1], %r2, %h1
        cp.async.bulk.tensor .tile::gather4: cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4
            .mbarrier::complete_tx::bytes [%r1], [%rd1, {%r1, %r2, %r3, %r4, %r5}], [%r6]
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], %r2, [%r3]
        cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1], [%r1], %r2
        cp.async.bulk.prefetch.L2.global [%rd1], %r1
        cp.async.bulk.tensor: cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {%r1, %r2}], [%r3]
        cp.async.bulk.tensor .im2col: cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes
            [%r1], [%rd1, {%r2, %r3, %r4}], [%r5], {%h1}
        cp.reduce.async.bulk.tensor: cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.tile.bulk_group
            [%rd1, {%r1}], [%r2]
        tensormap.replace.tile.global_address.global.b1024.b64 [%rd1], %rd2
        tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd1], [%r1], 128
    """,
    "textures and surfaces": """
        tex.2d.v4.f32.f32 {%f1, %f2, %f3, %f4}, [%rd1, {%f5, %f6}]
        tld4.r.2d.v4.f32.f32 {%f1, %f2, %f3, %f4}, [%rd1, {%f5, %f6}]
        txq.width.b32 %r1, [%rd1] | suld.b.1d.b32.trap %r1, [%rd1, {%r2}] | sust.b.1d.b32.trap [%rd1, {%r1}], %r2
        sured.b.add.1d.u32.trap [%rd1, {%r1}], %r2 | suq.width.b32 %r1, [%rd1] | istypep.texref %p1, %rd1
    """,
    "control flow": """
        bra: bra L; L: nop_: mov.b32 %r1, %r2
        brx.idx: T: .branchtargets A, B; brx.idx %r1, T; A: mov.b32 %r1, 1; B: mov.b32 %r1, 2
        exit | ret
    """,
    "barriers, fences, atomics": """
        bar.sync 0 | bar.arrive 1, 64 | bar.red.popc.u32 %r1, 0, %p1 | bar.warp.sync 0xffffffff
        barrier.cluster.arrive.aligned | barrier.cluster.wait.aligned | membar.gl | fence.acq_rel.gpu | fence.proxy.async
        fence.proxy.tensormap::generic.release.gpu | fence.mbarrier_init.release.cluster
        atom.global.add.u32 %r1, [%rd1], %r2 | atom.global.add.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1], {%f5, %f6, %f7, %f8}
        atom .b128: atom.global.exch.b128 %q1, [%rd1], %q2
        red.global.add.f32 [%rd1], %f1
        red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r1], %r2, [%r3]
        multimem.red.global.add.f32 [%rd1], %f1
        mbarrier.init.shared.b64 [%r1], 1 | mbarrier.inval.shared.b64 [%r1] | mbarrier.arrive.shared.b64 %rd1, [%r1]
        mbarrier.arrive_drop.shared.b64 %rd1, [%r1] | mbarrier.expect_tx.relaxed.cta.shared.b64 [%r1], %r2
        mbarrier.complete_tx.relaxed.cta.shared.b64 [%r1], %r2 | mbarrier.test_wait.shared.b64 %p1, [%r1], %rd1
        mbarrier.try_wait.parity.shared.b64 %p1, [%r1], %r2 | mbarrier.pending_count.b64 %r1, %rd1
        griddepcontrol.wait | griddepcontrol.launch_dependents
        clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%rd1], [%rd2]
    """,
    "warps": """
        shfl.sync.bfly.b32 %r1, %r2, 1, 31, 0xffffffff | vote.sync.ballot.b32 %r1, %p1, 0xffffffff
        match.any.sync.b32 %r1, %r2, 0xffffffff | activemask.b32 %r1 | redux.sync.add.s32 %r1, %r2, 0xffffffff
        elect.sync %r1|%p1, 0xffffffff
    """,
    "matrices": """
        ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r2] | stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1], {%r2}
        stmatrix .b8: stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r1], {%r2}
        ldmatrix .b8: ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r1, %r2}, [%r3]
        movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r2
        wmma: wmma.load.a.sync.aligned.row.m16n16k8.global.tf32 {%r1, %r2, %r3, %r4}, [%rd1], %r5
        mma: mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%f1, %f2, %f3, %f4}, {%r1, %r2}, {%r3}, {%f5, %f6, %f7, %f8}
        mma.sp: mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
            {%f1, %f2, %f3, %f4}, {%r1, %r2}, {%r3, %r4}, {%f5, %f6, %f7, %f8}, %r5, 0x0
        mma .block_scale: mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.f32.e4m3.e4m3.f32.ue8m0
            {%f1, %f2, %f3, %f4}, {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%f5, %f6, %f7, %f8}, %r7, {%h1, %h2}, %r8, {%h3, %h4}
        wgmma.mma_async: wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, %rd1, %rd2, %p1, 1, 1, 0, 0
        wgmma.mma_async.sp: wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16
            {%f1, %f2, %f3, %f4}, %rd1, %rd2, %r1, 0, %p1, 1, 1, 0, 0
        wgmma.fence.sync.aligned | wgmma.commit_group.sync.aligned | wgmma.wait_group.sync.aligned 0
        tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32 | tcgen05.commit.cta_group::1.b64 [%rd1]
    """,
    "the rest": """
        stacksave.u64 %rd1 | stackrestore.u64 %rd1 | alloca.u64 %rd1, %rd2 | vadd.s32.s32.s32 %r1, %r2, %r3
        vset2: vset2.s32.s32.lt %r1, %r2, %r3, %r4
        vabsdiff4.u32.u32.u32.add %r1, %r2, %r3, %r4 | brkpt | nanosleep.u32 100 | pmevent 1 | trap
        setmaxnreg.inc.sync.aligned.u32 240
    """,
}

KERNEL = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry form(.param .u64 form_param_0)
{{
    .reg .b8 %b<3>; .reg .b16 %h<5>; .reg .b32 %r<9>; .reg .f32 %f<9>; .reg .b64 %rd<5>; .reg .f64 %d<5>; .reg .pred %p<3>;
    .reg .b128 %q<3>;
    {}
    ret;
}}
"""


def forms(text: str) -> dict[str, str]:
    """Name -> PTX, of a family in `FORMS`: a line for each, or several with | between."""
    lines: list[str] = []
    for line in text.strip("\n").splitlines():
        if line.startswith(" " * 12) and lines:
            lines[-1] += f" {line.strip()}".replace(" .", ".")
        elif line.strip():
            lines.append(line.strip())
    found: dict[str, str] = {}
    for line in lines:
        name, colon, rest = line.partition(": ")
        parts = (
            [(name, rest)] if colon and " %" not in name else [(part.split()[0], part) for part in line.split(" | ")]
        )
        found |= {_short(key) if not colon else key: ptx for key, ptx in parts}
    return found


def _short(name: str) -> str:
    """`mbarrier.init` of `mbarrier.init.shared.b64`, `add` of `add.s32`."""
    keeps = ("mbarrier", "bar", "barrier", "fence", "cp", "wgmma", "tcgen05", "multimem", "tensormap",
             "griddepcontrol", "st", "ld")  # fmt: skip
    words = name.split(".")
    if words[0] not in keeps:
        return words[0]
    if words[0] in ("st", "ld"):
        return ".".join(words[:1] + [word for word in words[1:] if word in ("async", "bulk", "nc")])
    last = 1
    while last < len(words) and words[last].split("::")[0] in (
        "async", "bulk", "reduce", "prefetch", "mbarrier", "sync", "arrive", "red", "warp", "cluster", "wait", "proxy",
        "init", "inval", "arrive_drop", "expect_tx", "complete_tx", "test_wait", "try_wait", "pending_count", "fence",
        "commit_group", "wait_group", "alloc", "commit", "ld_reduce", "replace", "cp_fenceproxy", "mbarrier_init",
        "tensormap", "launch_dependents", "st",
    ):  # fmt: skip
        last += 1
    return ".".join(words[:last])


def covered(ptx: str) -> bool:
    """Whether the simulator translates it."""
    try:
        Program(KERNEL.format(ptx + ";")).kernel("form")
    except (UnsupportedInstruction, InvalidPtx):
        return False
    return True


def table() -> str:
    """As Markdown."""
    rows = ["| PTX 8.x | covered | refused |", "|---|---|---|"]
    for family, text in FORMS.items():
        sides: dict[bool, list[str]] = {True: [], False: []}
        for name, ptx in forms(text).items():
            sides[covered(ptx)].append(f"`{name}`")
        rows.append(
            f"| {family} | {', '.join(dict.fromkeys(sides[True]))} | {', '.join(dict.fromkeys(sides[False]))} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put it into docs/simulator.md")
    if not parser.parse_args().write:
        print(table())
        return
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
