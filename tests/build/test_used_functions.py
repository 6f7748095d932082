"""What a source does not call is left out of it, and nothing else."""

from __future__ import annotations

import re

import pytest

from cudatma.build.render import render
from cudatma.build.used_functions import without_unused
from cudatma.kernels.registry import REGISTRY
from cudatma.target import get_target

SOURCE = """
// The first.
__device__ __forceinline__ void used_1() { helper<4>(1); }

// Of both: nobody calls the first.
template <int N>
__device__ __forceinline__ int pair_1(
    int value) {
    return N;
}

__device__ __forceinline__ int pair_2(int value) { return value; }

// Calls itself, and is called by the next, which nobody calls.
__device__ __forceinline__ int lost_1() { return lost_1(); }
__device__ __forceinline__ void lost_2() { lost_1(); }
template <int N> __device__ __forceinline__ int helper(int value) {
    if (value) {
        return pair_2(value);
    }
    return N;   // lost_2()
}
__device__ __forceinline__ int helper(float value) { return 0; }
struct Ring {
    u32 stage;

    // Never called.
    __device__ __forceinline__ void never() {}

    // Called, and calls another one.
    __device__ __forceinline__ void advance() {
        if (stage) {
            wrap();
        }
    }
    template <u32 Laps>
    __device__ __forceinline__ void wrap() { asm volatile("never;"); }
    template <u32 Laps>
    __device__ __forceinline__ void lost_3(u32 slot) {
        wrap();
    }
};
extern "C" __global__ void kernel() { used_1(); Ring().advance(); }
"""
KEPT = """
// The first.
__device__ __forceinline__ void used_1() { helper<4>(1); }

// Of both: nobody calls the first.
__device__ __forceinline__ int pair_2(int value) { return value; }

template <int N> __device__ __forceinline__ int helper(int value) {
    if (value) {
        return pair_2(value);
    }
    return N;   // lost_2()
}
__device__ __forceinline__ int helper(float value) { return 0; }
struct Ring {
    u32 stage;

    // Called, and calls another one.
    __device__ __forceinline__ void advance() {
        if (stage) {
            wrap();
        }
    }
    template <u32 Laps>
    __device__ __forceinline__ void wrap() { asm volatile("never;"); }
};
extern "C" __global__ void kernel() { used_1(); Ring().advance(); }
"""


def test_by_hand() -> None:
    assert without_unused(SOURCE) == KEPT
    assert without_unused(KEPT) == KEPT


def test_pasted_names_keep_all() -> None:
    pasted = f"#define CALL(i) lost_##i()\n{SOURCE}"
    assert without_unused(pasted) == pasted


def test_a_comment_after_a_function_of_one_line_belongs_to_it() -> None:
    unused = "__device__ __forceinline__ int one() { return 1; }   // never called\n"
    used = "__device__ __forceinline__ void used() {\n}\nvoid kernel() { used(); }\n"
    assert without_unused(unused + used) == used


def test_namespaces_become_one_and_empty_ones_go() -> None:
    opened, closed = "namespace cudatma {\n", "}  // namespace cudatma\n"
    unused = "\n__device__ __forceinline__ int unused() { return 0; }\n\n"
    source = f"{opened}{unused}{closed}{opened}\nint a;\n\n{closed}\n{opened}int b;\n{closed}int c;\n"
    assert without_unused(source) == f"{opened}\nint a;\n\nint b;\n{closed}int c;\n"


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.parametrize("debug", [False, True])
def test_every_function_of_a_kernel_is_called(name: str, debug: bool) -> None:
    entry = REGISTRY[name]
    target = next(one for one in map(get_target, ("sm_90a", "sm_100a")) if entry.specs(one))
    for spec in entry.specs(target)[:2]:
        source = re.sub(r"//.*", "", render(entry.template, spec, target, debug=debug))
        defined = set(re.findall(r"^(?:template.*\s)?__device__ __forceinline__ [^;{}]*?(\w+)\(", source, re.MULTILINE))
        assert defined or name == "plain_copy"
        assert [one for one in sorted(defined) if len(re.findall(rf"\b{one}\b", source)) < 2] == []


def test_constants_that_nothing_names_go_line_by_line() -> None:
    unused = "constexpr u32 A = 1, B = 2;   // C\nconstexpr u32 C = A;   // A, B\n"
    used = "constexpr u32 D = 3, E = 4;\nint d = D;\n"
    assert without_unused(unused + used) == used


def test_a_users_text_stays_as_it_is() -> None:
    assert "unused_one" in render("__device__ __forceinline__ void unused_one() {}\n", None, "sm_90a", is_source=True)
