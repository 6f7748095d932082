"""Broken, huge and malicious PTX and launches: a report or a typed error, in bounded time and memory."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import hostile
import numpy as np
import probe_configs as probes
import pytest
from ptx_of import ptx_of_template

from cudatma.emulator import EmulatorError, PtxError, StepLimitError, load
from cudatma.emulator.machine import scheduler
from cudatma.errors import ArgumentError, ArgumentTypeError, CudaTmaError, HazardError
from cudatma.kernels.marlin.candidates import dump_configs
from cudatma.target import get_target

HEAD = ".version 8.6\n.target sm_90a\n.address_size 64\n"
REGISTERS = ".reg .pred %p<9>;\n.reg .b32 %r<9>;\n.reg .b64 %rd<9>;\n"
BASES: dict[str, tuple[str, Any]] = {
    "ring": ("probes/ring.cu.j2", probes.Ring(3, 2)),
    "box_copy": ("probes/box_copy.cu.j2", probes.BoxCopy(2, 1024, 1024)),
    "multicast": ("probes/multicast.cu.j2", probes.Multicast(1024, 8)),
    "sync": ("probes/sync.cu.j2", probes.Plain("sync")),
    "mma": ("probes/mma.cu.j2", probes.Mma("f16")),
    "wgmma_gemm": ("probes/wgmma_gemm.cu.j2", probes.WgmmaGemm(1, 64, 3)),
}


@pytest.fixture
def early_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for infinite loops early, and record fewer steps after the step limit."""
    monkeypatch.setattr(scheduler, "LOOK_PERIOD", 500)
    monkeypatch.setattr(scheduler, "RECORD_PERIOD", 100)
    monkeypatch.setattr(scheduler, "LAST_STEPS", 400)


def base(name: str) -> str:
    return ptx_of_template(*BASES[name])


def kernel(body: str, before: str = "", params: str = ".param .u64 p") -> str:
    return f"{HEAD}{before}.visible .entry k({params})\n{{\n{REGISTERS}{body}\nret;\n}}\n"


def run(text: str, args: Any = None, **options: Any) -> Any:
    """Launch ``k`` for one warp and collect hazards."""
    chosen = {"grid": 1, "block": 32, "hazards": "collect", "schedules": 2, **options}
    args = (np.zeros(64, np.uint32),) if args is None else args
    return load(text).launch(chosen.pop("name", "k"), chosen.pop("grid"), chosen.pop("block"), args, **chosen)


# ---- text


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", BASES)
def test_mutants_end_in_a_report_or_a_typed_error(name: str) -> None:
    for what, text in hostile.mutants(base(name), 60, len(name)):
        assert hostile.attempt(text) != "", what


def test_truncated_kernels() -> None:
    marlin = ptx_of_template("kernels/marlin_mma_sync.cu.j2", dump_configs("mma_sync", get_target("sm_90a"))[0])
    for text, step in ((base("box_copy"), 211), (marlin, 9001)):
        for end in range(0, len(text), step):
            assert hostile.attempt(text[:end]) != ""


@pytest.mark.parametrize(
    "text",
    [
        *("", " \n\t\r\n", "\0" * 50, "\ufeff" + kernel(""), HEAD + "\0" + kernel(""), HEAD + "\ud800", HEAD + '"open'),
        *(None, 5, b"bytes", HEAD + "/* open", HEAD + ".visible .entry (", HEAD + ".visible .entry k(.param .u64 p"),
        kernel("").replace(".version 8.6\n", ""),
        kernel("").replace(".target sm_90a\n", ""),
        kernel("").replace("sm_90a", "sm_banana"),
        kernel("").replace("size 64", "size 32"),
        kernel("{" * 5000 + "}" * 5000),
        kernel("mov.u32 %r1, " + "(" * 5000 + ")" * 5000 + ";"),
        kernel("mov.u32 %r1, " + "!" * 5000 + "%r2;"),
        HEAD + ".global .u32 x = " + "{" * 5000 + "}" * 5000 + ";",
        kernel(".reg .b32 %q<1000000000>;"),
        kernel(".reg .b32 %q<-1>;"),
        kernel(".reg .b32 %r<9>;"),
        kernel(".reg .b32 %x;\n.reg .b32 %x;"),
        kernel("L:\nL:"),
        kernel("bra NOWHERE;"),
        kernel("mov.u32 %r77, 1;"),
        kernel("mov.u32 %q1, 1;"),
        kernel("add.u32 %p1, %r1, %r2;"),
        kernel("@%r1 bra L;\nL:"),
        kernel("add.u32 %r1;"),
        kernel("setp.eq.u32 [%r1], %r2;"),
        kernel("frobnicate.u32 %r1, %r2;"),
        kernel(".shared .b8 x[1152921504606846976];"),
        kernel(".shared .b8 x[-1];"),
        kernel(".shared .b8 x[4];\n.shared .b8 x[8];"),
        kernel(".local .align 3 .b8 x[4];"),
        kernel("", ".global .b8 x[100000][100000][100000];\n"),
        kernel("", "".join(f".global .b8 x{i}[4000000000];\n" for i in range(300))),
        kernel("", ".global .align 1099511627776 .b8 x[4];\n"),
        kernel("", params=".param .u64 p, .param .u64 p"),
        kernel("", params=", ".join(f".param .u8 p{i}" for i in range(5000))),
        kernel("") + kernel("").replace(HEAD, ""),
        kernel("call.uni nobody;"),
        kernel("call.uni nobody;", ".extern .func nobody();\n"),
        kernel("brx.idx %r1, T;"),
    ],
    ids=lambda text: repr(text)[-60:],
)
def test_text_that_is_refused(text: Any) -> None:
    with pytest.raises(PtxError) as caught:
        run(text)
    assert len(str(caught.value)) < 2000


@pytest.mark.slow
def test_ten_megabytes_in_bounded_memory() -> None:
    """Each parse has 2 GB of address space for everything, NumPy included."""
    script = """
        import resource, sys, time
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
        from cudatma.emulator import PtxError, load
        head = ".version 8.6\\n.target sm_90a\\n.address_size 64\\n"
        for part in ("(", " "):
            try:
                load(head + part * (10_000_000 // len(part)))
            except PtxError:
                pass
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-500:]


# ---- running


@pytest.mark.parametrize(
    "body",
    ["L: bra L;", "L: bar.sync 0;\nbra L;"],
)
def test_endless_loops_meet_the_step_limit(body: str) -> None:
    with pytest.raises(StepLimitError, match="infinite loop"):
        run(kernel(f"ld.param.u64 %rd1, [p];\nmov.u32 %r1, 0;\n{body}"), step_limit=5000)


@pytest.mark.parametrize(
    ("body", "line", "what"),
    [
        ("L: ld.global.u32 %r1, [%rd1];\nsetp.eq.u32 %p1, %r1, 0;\n@%p1 bra L;", 11, "an ordinary load"),
        ("bra L;\nL: bra L;", 12, "does not read memory"),
        ("mov.u32 %r2, %tid.x;\nsetp.gt.u32 %p2, %r2, 31;\n@%p2 bra E;\nL: bra L;\nE: bar.sync 0;", 14, "bar.sync"),
    ],
)
def test_an_endless_loop_names_its_lines(body: str, line: int, what: str) -> None:
    text = kernel(f"ld.param.u64 %rd1, [p];\nmov.u32 %r1, 0;\n{body}")
    report = run(text, grid=3, block=64, schedules=3)
    assert report.kinds == {"deadlock"}, str(report)
    (hazard,) = report.hazards
    assert (hazard.ptx_line, hazard.blocks) == (line, 3)
    assert what in hazard.message
    assert "the loop never becomes true" in hazard.cause
    assert hazard.message.count("an infinite loop") == 1, "warps that loop alike have one line"


#: Warp 0 executes BODY and passes its result to the other warps through shared memory, as Triton's atomics do.
TOGETHER = """ld.param.u64 %rd1, [p];
mov.u32 %r1, %tid.x;
setp.eq.u32 %p1, %r1, 0;
mov.u32 %r2, 0;
mov.u32 %r3, 1024;
L: bar.sync 0;
BODY
@%p1 st.shared.u32 [%r3], %r1;
bar.sync 0;
ld.shared.u32 %r1, [%r3];
setp.ne.u32 %p2, %r1, LAST;
@%p2 bra L;"""


@pytest.mark.usefixtures("early_looks")
@pytest.mark.parametrize(
    ("body", "last", "is_endless"),
    [
        ("@%p1 atom.global.cas.b32 %r1, [%rd1], 0, 1;", 2, True),
        ("@%p1 atom.global.add.u32 %r1, [%rd1], 1;", 200, False),
        ("add.u32 %r2, %r2, 1;\nsetp.gt.u32 %p3, %r2, 200;\nselp.u32 %r1, 1, 0, %p3;", 1, False),
        ("mov.u32 %r1, %clock;\nshr.u32 %r1, %r1, 20;", 1, False),
    ],
    ids=["lock", "counter in memory", "counter in a register", "clock"],
)
def test_a_loop_with_barriers_is_endless_if_nothing_changes(body: str, last: int, is_endless: bool) -> None:
    text = kernel(TOGETHER.replace("BODY", body).replace("LAST", str(last)))
    report = run(text, grid=1, block=64, schedules=1, shared_bytes=16)
    assert report.kinds == ({"deadlock"} if is_endless else set()), str(report)
    assert not is_endless or "polls byte 0 of p, whose value remains 1" in str(report)


@pytest.mark.usefixtures("early_looks")
def test_the_step_limit_names_the_loop() -> None:
    counted = "L: add.u32 %r1, %r1, 1;\nst.global.u32 [%rd1], %r1;\nbra L;"
    text = kernel(f"ld.param.u64 %rd1, [p];\nmov.u32 %r1, 0;\n{counted}")
    shown: list[tuple[int, int]] = []
    with pytest.raises(StepLimitError, match="through PTX lines 11-13"):
        run(text, block=32, replay=2, step_limit=1000, progress=lambda done, steps: shown.append((done, steps)))
    assert (0, 0) < max(shown) < (1, 0)


def test_waiting_for_ever_is_a_deadlock_and_not_the_step_limit() -> None:
    head = "mov.u32 %r2, 1024;\nmov.u32 %r1, %tid.x;\nsetp.eq.u32 %p2, %r1, 0;\n"
    head += "@%p2 mbarrier.init.shared::cta.b64 [%r2], 1;\nbar.sync 0;\n"
    for wait in ("try_wait", "test_wait"):
        body = f"{head}L: mbarrier.{wait}.parity.shared::cta.b64 %p1, [%r2], 0;\n@!%p1 bra L;"
        assert "deadlock" in run(kernel(body), shared_bytes=64).kinds
    spin = "ld.param.u64 %rd1, [p];\nL: ld.volatile.global.u32 %r1, [%rd1];\nsetp.eq.u32 %p1, %r1, 0;\n@%p1 bra L;"
    assert "deadlock" in run(kernel(spin)).kinds
    named = "mov.u32 %r1, %tid.x;\nshr.u32 %r1, %r1, 5;\nadd.u32 %r1, %r1, 1;\nbarrier.sync %r1, 64;"
    report = run(kernel(named), block=64)
    assert "deadlock" in report.kinds
    assert "a branch skips it" in report.hazards[0].cause


@pytest.mark.parametrize(
    ("body", "before"),
    [
        ("call.uni f;", ".func f()\n{\ncall.uni f;\nret;\n}\n"),
        ("call.uni f;", ".func g();\n.func f()\n{\ncall.uni g;\nret;\n}\n.func g()\n{\ncall.uni f;\nret;\n}\n"),
        (
            "call.uni f;",
            ".func f()\n{\n.local .b8 x[400000];\n.reg .b64 %a;\nmov.u64 %a, x;\ncall.uni f;\nret;\n}\n",
        ),
        (
            ".param .b8 q;\ncall.uni f, (q);",
            ".func f(.param .b64 a)\n{\n.reg .b64 %a;\nld.param.u64 %a, [a+1000];\nret;\n}\n",
        ),
        ("mov.u64 %rd1, 5;\nP: .callprototype _();\ncall %rd1, (), P;", ""),
        ("mov.u32 %r1, 99;\nT: .branchtargets L1;\nbrx.idx %r1, T;\nL1:", ""),
        ("bar.sync 16;", ""),
        ("trap;", ""),
    ],
)
def test_what_the_hardware_would_stop_is_a_trap(body: str, before: str) -> None:
    assert "trap" in run(kernel(body, before)).kinds
    with pytest.raises(CudaTmaError):
        run(kernel(body, before), hazards="raise")


@pytest.mark.parametrize("address", [0, 1, 1 << 63, (1 << 64) - 1, 1 << 60, (1 << 60) | 0x55000400, 1 << 61, 1 << 62])
def test_pointers_to_nowhere(address: int) -> None:
    """Every access, with and without the hazard layer: no byte outside of mapped memory is touched."""
    for access in (
        *("ld.global.u32 %r1, [%rd1];", "st.global.u32 [%rd1], %r2;", "ld.u32 %r1, [%rd1];", "st.u32 [%rd1], %r2;"),
        *("atom.global.add.u32 %r1, [%rd1], 1;", "atom.add.u32 %r1, [%rd1], 1;", "ld.shared.u32 %r1, [%rd1];"),
        *("ld.local.u32 %r1, [%rd1];", "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];"),
        "mbarrier.arrive.shared::cta.b64 %rd2, [%rd1];",
        "cp.async.ca.shared.global [%rd1], [%rd1], 16;",
        "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%rd1], 16;",
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%rd1], [%rd1], 16, [%rd1];",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%rd1];",
    ):
        text = kernel(f"mov.u64 %rd1, {address};\nmov.u32 %r2, 0;\n{access}")
        for hazards in ("collect", "off"):
            try:
                report = run(text, hazards=hazards, shared_bytes=64)
                assert hazards == "off" or report.kinds, access
            except EmulatorError:
                assert hazards == "off", access


@pytest.mark.parametrize(
    ("access", "memory"),
    [
        ("mov.u64 %rd2, s;\ncvta.shared.u64 %rd2, %rd2;\nld.global.u32 %r1, [%rd2];", "of shared memory"),
        ("mov.u64 %rd2, s;\nst.u32 [%rd2], 0;", "convert it to a generic address with cvta.shared"),
        ("ld.shared.u32 %r1, [%rd1];", "of global memory"),
        ("mov.u64 %rd2, l;\ncvta.local.u64 %rd2, %rd2;\nld.global.u32 %r1, [%rd2];", "of local memory"),
        ("mov.u64 %rd2, l;\ncvta.local.u64 %rd2, %rd2;\nld.local.u32 %r1, [%rd2];", "of local memory"),
        ("ld.local.u32 %r1, [%rd1];", "of global memory"),
        ("mbarrier.init.b64 [%rd1], 1;", "of global memory"),
        ("mov.u64 %rd2, s;\ncp.async.ca.shared.global [%rd1], [%rd1], 16;", "of global memory"),
        (
            "mov.u64 %rd2, l;\ncvta.local.u64 %rd3, %rd2;\nmov.u64 %rd2, s;\n"
            "cp.async.bulk.global.shared::cta.bulk_group [%rd3], [%rd2], 16;",
            "of local memory",
        ),
        ("mov.u64 %rd2, l;\ncvta.local.u64 %rd2, %rd2;\nprefetch.tensormap [%rd2];", "__grid_constant__"),
    ],
)
def test_an_address_of_another_memory(access: str, memory: str) -> None:
    variables = ".shared .align 16 .b8 s[64];\n.local .align 16 .b8 l[64];\nld.param.u64 %rd1, [p];"
    report = run(kernel(f"{variables}\n{access}"))
    assert "trap" in report.kinds
    assert memory in report.hazards[0].message, str(report)


@pytest.mark.parametrize(
    "access",
    [
        "stSPACE.u32 [%rd3], %r1;",
        "stmatrix.sync.aligned.m8n8.x1SPACE.b16 [%rd3], {%r1};",
        "st.shared.v4.u32 [%rd2], {%r1, %r1, %r1, %r1};\nbar.warp.sync -1;\n"
        "ldmatrix.sync.aligned.m8n8.x1SPACE.b16 {%r3}, [%rd3];",
        "@%p1 mbarrier.initSPACE.b64 [%rd3], 1;",
        "@%p1 st.bulkSPACE [%rd3], 64, 0;",
    ],
)
def test_a_generic_address_in_the_shared_state_space_is_worth_a_warning(access: str) -> None:
    """An H200 reads its low half, the address in .shared; PTX does not promise that."""
    body = ".shared .align 16 .b8 s[64];\nmov.u64 %rd2, s;\ncvta.shared.u64 %rd3, %rd2;\nmov.u32 %r1, 7;\n"
    body += "mov.u32 %r2, %tid.x;\nsetp.eq.u32 %p1, %r2, 0;\n"
    for space in (".shared::cta", ""):
        report = run(kernel(body + access.replace("SPACE", space)))
        assert not report.kinds, str(report)
        warned = ["generic address of shared memory" in warning.message for warning in report.warnings]
        assert warned == [True] * bool(space), str(report)


def test_random_bytes_as_a_tensor_map_trap() -> None:
    rng = np.random.default_rng(4)
    body = "ld.param.u64 %rd1, [p];\nmov.u32 %r1, 1024;\nmov.u32 %r2, 2048;\nmov.u32 %r3, 0;\n"
    body += "mbarrier.init.shared::cta.b64 [%r2], 1;\nfence.proxy.async;\n"
    body += (
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r3, %r3}], [%r2];"
    )
    whole = np.zeros(1024, np.uint8)
    aligned = whole[-whole.ctypes.data % 128 :][:128]
    for _ in range(40):
        aligned[:] = rng.integers(0, 256, 128)
        aligned[8] = 1 << 4  # rank 2, tiled
        assert "trap" in run(kernel(body), (aligned,), block=1, shared_bytes=4096).kinds


def test_arithmetic_without_an_answer_raises_nothing() -> None:
    body = "mov.u32 %r1, 0;\nmov.u32 %r3, 4294967295;\nmov.u32 %r4, 40;\nmov.u64 %rd2, 0x8000000000000000;\n"
    body += "".join(f"{o}.{t} %r2, %r3, %r1;\n" for o in ("div", "rem") for t in ("u32", "s32"))
    body += "div.s64 %rd1, %rd2, -1;\nrem.s64 %rd1, %rd2, 0;\nshl.b32 %r2, %r3, %r4;\nshr.s32 %r2, %r3, %r3;\n"
    body += "shl.b64 %rd1, %rd2, %r3;\nbfe.u32 %r2, %r3, %r3, %r3;\nbfi.b32 %r2, %r3, %r3, %r3, %r3;\n"
    assert hostile.attempt(kernel(body)) == "report"


# ---- launches


@pytest.mark.parametrize(
    "options",
    [
        *({"grid": g} for g in (0, -1, 1.5, None, "a", (), (1, 1, 1, 1), 1 << 31, (1, 70000), True, float("nan"))),
        *({"block": b} for b in (0, 1025, 10**40, (1, 1, 65), (0, 1), None)),
        *({"cluster": c, "grid": 4} for c in (0, 3, -1, "x", 100)),
        *({"shared_bytes": s} for s in (-1, 10**9, 10**30, 1.5, None)),
        *({"schedules": s} for s in (0, -1, 1.5, None, True)),
        *({"step_limit": 0}, {"step_limit": "x"}, {"resident_clusters": 0}, {"seed": "x"}, {"replay": -1}),
        *({"hazards": "x"}, {"target": "sm_1"}, {"arrays": 5}, {"trace": 5}, {"name": "zzz"}),
    ],
    ids=str,
)
def test_launches_that_cannot_work(options: dict[str, Any]) -> None:
    with pytest.raises(CudaTmaError):
        run(kernel(""), **options)


@pytest.mark.parametrize(
    "args",
    [
        *((), (1, 2), 5, "a", ("x",), (object(),), (1j,), ([1, 2],), (10**40,)),
        *((np.zeros(4, ">u4"),), (np.zeros(4, object),), (b"123",), ({"a": 1},)),
    ],
    ids=lambda args: "object" if "object object" in str(args) else str(args),
)
def test_arguments_that_do_not_fit(args: Any) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError)):
        run(kernel(""), args)


STORE = "ld.param.u64 %rd1, [p];\nst.global.u32 [%rd1], 7;"


def test_arrays_of_all_kinds() -> None:
    plain = np.zeros((8, 8), np.uint32)
    frozen = np.zeros(8, np.uint32)
    frozen.flags.writeable = False
    for array in (plain.T, plain[:, :3], plain[::-1], np.ma.array(plain), np.zeros((), np.uint32)):
        assert not run(kernel(STORE), (array,)).kinds
    assert "trap" in run(kernel(STORE), (frozen,)).kinds
    assert not frozen.any()


def test_arrays_that_overlap_are_one_memory() -> None:
    whole = np.zeros(64, np.uint32)
    body = "ld.param.u64 %rd1, [p];\nld.param.u64 %rd2, [q];\nst.global.u32 [%rd1], 1;\nst.global.u32 [%rd2+80], 2;\n"
    body += "st.global.v4.u32 [%rd1+64], {5, 5, 5, 5};\nst.global.v4.u32 [%rd1+80], {6, 6, 6, 6};"
    for first, second in ((whole[:40], whole[20:]), (whole[20:], whole[:40])):
        whole[:] = 0
        args = (whole, second) if first is whole else (first, second)
        report = run(kernel(body, params=".param .u64 p, .param .u64 q"), args, block=1)
        assert not report.kinds, str(report)


def test_a_launch_that_raises_leaves_the_arrays_as_they_were() -> None:
    array = np.arange(64, dtype=np.uint32)
    before = array.copy()
    for body, error in (
        ("trap;", EmulatorError),
        ("L: bra L;", StepLimitError),
        ("ld.shared.u32 %r1, [0];", CudaTmaError),
    ):
        with pytest.raises(error):
            run(kernel(f"{STORE}\n{body}"), (array,), hazards="raise", step_limit=1000, schedules=1)
        assert (array == before).all()


def test_hazards_of_a_kernel_that_ended_leave_its_results() -> None:
    array = np.arange(64, dtype=np.uint32)
    body = ".shared .b32 s;\nld.shared.u32 %r1, [s];\n" + STORE
    with pytest.raises(HazardError) as raised:
        run(kernel(body), (array,), hazards="raise", block=1)
    assert [hazard.kind for hazard in raised.value.hazards] == ["uninitialized_shared"]
    assert array[0] != 0


def test_an_interruption_stops_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(64, dtype=np.uint32)
    calls = []

    def interrupt(done: int, steps: int) -> None:
        calls.append((done, steps))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(kernel(STORE), (array,), progress=interrupt)
    assert calls == [(1, 0)]
    assert array[0] == 0


@pytest.mark.usefixtures("early_looks")
def test_a_grid_of_two_thousand_million_blocks_is_made_as_it_runs() -> None:
    with pytest.raises(StepLimitError):
        run(kernel(""), grid=(2**31 - 1, 65535, 65535), step_limit=300)
