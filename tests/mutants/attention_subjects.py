"""Attention's versions as subjects: rings of two slots that wrap twice, persistent CTAs with several tiles,
blocks of keys that the first warpgroup does not see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from subject import Subject

from cudatma.arrays import describe
from cudatma.kernels.arguments import Arguments
from cudatma.kernels.attention.arguments import decode_sizes, launch_arguments
from cudatma.kernels.attention.attention import ATTENTION_CALL
from cudatma.kernels.attention.check import check_attention, check_decode
from cudatma.kernels.attention.config import VERSIONS, AttentionConfig
from cudatma.kernels.attention.decode import DECODE_CALL
from cudatma.kernels.attention.sample import small_config
from cudatma.kernels.engine import host_workspace
from cudatma.kernels.gpu import imagined_gpu
from cudatma.kernels.host import host_bytes
from cudatma.mutants.mutant import Call
from cudatma.target import get_target

_TARGET = "sm_90a"
_HEAD_DIM = 32


def _config(version: str, **fields: Any) -> AttentionConfig:
    """Return a small configuration. In narrow heads, a1's threads would copy 32 rows at a time, two blocks."""
    dim = 64 if version == "a1" else _HEAD_DIM
    return small_config(version, head_dim=dim, v_head_dim=dim, **fields)


def _attention_call(config: AttentionConfig) -> Callable[[], Call]:
    """Five blocks of keys or more, the last one a part; three tiles for a persistent CTA, else two CTAs."""

    def make() -> Call:
        q_length, k_length = (3 if config.is_persistent else 2) * config.tile_m - 5, 5 * config.tile_n - 3
        if config.is_causal:
            q_length, k_length = 2 * config.tile_m - 5, 2 * config.tile_m + config.tile_n
        random = np.random.default_rng(7)
        q, k, v = (
            random.standard_normal((1, length, 1, config.head_dim), np.float32).astype(np.float16)
            for length in (q_length, k_length, k_length)
        )
        out, lse = np.zeros_like(q), np.zeros((1, 1, q_length), np.float32)
        checked = check_attention(q, k, v, causal=config.is_causal, out=out, return_lse=True)
        (arguments,) = ATTENTION_CALL.arguments(checked.problem, config, imagined_gpu(_TARGET, 1), ())
        return _call(arguments, ATTENTION_CALL.named(checked), lse)

    return make


def _call(arguments: Arguments, named: dict[str, Any], lse: Any) -> Call:
    """Return a launch that waits for a kernel that wrote all of its arrays."""
    named |= {"lse": describe(lse)} | host_workspace(arguments.sizes)
    arrays = tuple(host_bytes(info) for info in named.values())
    return Call(
        arguments.config.entry,
        arguments.sizes.grid,
        arguments.config.threads,
        tuple(arguments.filled(named)),
        shared_bytes=arguments.shared_bytes,
        arrays=arrays,
        options=(("produced_by_previous", arrays),),
        keep=named,
    )


def _decode_call(config: AttentionConfig) -> Callable[[], Call]:
    """Two parts of nine blocks of keys, the last block a part; in pages that are loaded as the config says."""

    def make() -> Call:
        length, page_size = 9 * config.tile_n - 3, config.box_rows or 5
        random, pages = np.random.default_rng(7), -(-length // page_size)
        q = random.standard_normal((1, 1, 2, _HEAD_DIM), np.float32).astype(np.float16)
        kind = np.float16 if config.kv_bytes == 2 else ml_dtypes.float8_e4m3fn
        k, v = (random.standard_normal((pages, page_size, 1, _HEAD_DIM), np.float32).astype(kind) for _ in range(2))
        table = random.permutation(pages).astype(np.int32)[None]
        out, lse = np.zeros_like(q), np.zeros((1, 2, 1), np.float32)
        lengths = np.array([length], np.int32)
        checked = check_decode(q, k, v, lengths, page_table=table, out=out, return_lse=True)
        sizes = decode_sizes(checked.problem, config, imagined_gpu(_TARGET, 1), parts=2)(checked.problem)
        arguments = launch_arguments(checked.problem, config, get_target(_TARGET), sizes)
        return _call(arguments, DECODE_CALL.named(checked), lse)

    return make


def decode_subjects() -> list[Subject]:
    """Return pages by TMA and by cp.async, mma.sync, and keys and values in e4m3."""
    configs = {
        "attention_decode/boxes": _config("decode", tile_n=16, box_rows=16, is_paged=True),
        "attention_decode/rows": _config("decode", tile_n=16, box_rows=0, is_paged=True),
        "attention_decode_mma_sync/boxes": _config("decode_mma_sync", tile_n=16, box_rows=16, is_paged=True),
        "attention_decode_fp8/boxes": _config("decode_fp8", tile_n=64, box_rows=16, is_paged=True),
    }
    return [Subject(name, config.template, config, _decode_call(config), _TARGET) for name, config in configs.items()]


def attention_subjects() -> list[Subject]:
    """Each version once, the last one also with two slots of queries."""
    configs = {f"attention_{version}/small": _config(version, tile_n=16) for version in VERSIONS.names}
    last = configs["attention_a4/small"]
    configs["attention_a4/two_slots"] = replace(last, q_stages=2)
    configs["attention_a4/causal"] = replace(last, is_causal=True, tile_n=32)
    return [
        Subject(name, config.template, config, _attention_call(config), _TARGET) for name, config in configs.items()
    ] + decode_subjects()
