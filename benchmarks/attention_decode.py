"""Compare attention_decode, for one new query per sequence, with other libraries. The cache is cold in L2.

attention_decode reads a contiguous cache, pages of 16 keys, and pages of 16 keys in e4m3. cuDNN and FlashAttention-2
run through torch. FlashAttention-3 runs if a package provides its library. FlashAttention-4 and FlashInfer are
optional. FlashAttention-4 does not split the keys on Hopper. FlashInfer reads pages in 16 bits and in e4m3. Launches
rotate over copies of the cache that together exceed L2.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # The checkout need not be installed.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from benchmarks.attention import CUDNN, FA2, FA3, FA4, FLASHINFER, GROUPED, REST_S, add_rivals, parse_length
from benchmarks.contest import (
    BEST,
    Entrant,
    Rival,
    add_errors,
    add_times,
    chosen_results,
    field_of,
    find_entrants,
    measure_calls,
    present,
    summary_line,
    times_as_fast,
    timing_method,
    with_best,
)
from benchmarks.harness import Contender, copies_for, launches_for, measuring_stream, require_gpu, require_torch
from benchmarks.report import Cell, Result, Table, make_parser, shown
from benchmarks.rivals.attention import fa3_forward, fa4_forward, flashinfer_workspace
from cudatma.kernels.attention.decode import attention_decode

BATCHES, LENGTHS = (1, 8, 32, 128), (1024, 4096, 16384)
#: Number of keys per page.
PAGE = 16
OURS, PAGED, FP8 = "contiguous", f"pages of {PAGE}", "in e4m3"
#: FlashInfer's kernel without tensor cores.
FLASHINFER_CUDA_CORES = f"{FLASHINFER}, CUDA cores"
FLASHINFER_FP8 = f"{FLASHINFER}, e4m3"
IN_E4M3 = (FP8, FLASHINFER_FP8)
RIVALS = (CUDNN, FA2, FA3, FA4, FLASHINFER, FLASHINFER_CUDA_CORES)
#: Allowed error relative to the result's root mean square. Probabilities and the result are rounded.
_ALLOWED = 1.2e-2
#: Number of sequences that are compared with float64.
_SEQUENCES = 4


@dataclass(frozen=True, slots=True)
class Decoding:
    """A call with ``batch`` sequences of ``length`` keys and one query each, with GROUPED heads."""

    batch: int
    length: int

    def __str__(self) -> str:
        heads, kv_heads, dim = GROUPED
        return f"{self.batch} x {self.length}, {heads}/{kv_heads} heads of {dim}"

    @property
    def bytes(self) -> int:
        """Size of the keys and values in bytes."""
        return 4 * self.batch * self.length * GROUPED[1] * GROUPED[2]


class Caches:
    """The queries, copies of the cache, and views of the same memory as pages in random order."""

    def __init__(self, call: Decoding) -> None:
        import torch

        heads, kv_heads, dim = GROUPED
        self.call, self.copies = call, copies_for(call.bytes)
        self.launches = launches_for(call.bytes, self.copies)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        random = partial(torch.randn, device=device, dtype=torch.bfloat16)
        self.q = random((call.batch, 1, heads, dim))
        kv_shape = call.batch, call.length, kv_heads, dim
        self.contiguous = [(random(kv_shape), random(kv_shape)) for _ in range(self.copies)]
        self.seqlens = torch.full((call.batch,), call.length, device=device, dtype=torch.int32)
        pages = -(-call.length // PAGE)
        order = torch.randperm(call.batch * pages, device=device).to(torch.int32)
        self.table = order.reshape(call.batch, pages)
        self.is_paged = call.length % PAGE == 0

    def pages(self, copy: int) -> tuple[Any, Any]:
        """Return keys and values (pages, PAGE, kv_heads, dim). Raises ValueError if PAGE does not divide the length."""
        if not self.is_paged:
            raise ValueError(f"the number of keys must be a multiple of {PAGE}, got {self.call.length}")
        k, v = self.contiguous[copy]
        return k.reshape(-1, PAGE, *k.shape[2:]), v.reshape(-1, PAGE, *v.shape[2:])

    def out(self) -> Any:
        """Return an array like q filled with NaN, which reveals elements that are not written."""
        import torch

        return torch.full_like(self.q, math.nan)

    def copies_of(self, name: str) -> list[tuple[Any, Any]]:
        """Return the copies that a contender reads. There are more e4m3 copies, because each takes half the bytes."""
        if name in IN_E4M3:
            return self._rounded
        return self.contiguous if name == OURS else [self.pages(copy) for copy in range(self.copies)]

    @cached_property
    def _rounded(self) -> list[tuple[Any, Any]]:
        """Return copies of the pages in e4m3. The last copy contains the same values as the last 16-bit copy."""
        copies = copies_for(self.call.bytes // 2)
        pages = [self.pages((copy - copies) % self.copies) for copy in range(copies)]
        return [(in_e4m3(k), in_e4m3(v)) for k, v in pages]

    def entrant(self, name: str, run: Any, out: Any) -> Entrant:
        copies, launches = self.copies, self.launches
        if name in IN_E4M3:
            copies = len(self._rounded)
            launches = launches_for(self.call.bytes // 2, copies)
        return Entrant(name, Contender(name, run, copies, launches), out)


def in_e4m3(cache: Any) -> Any:
    import torch

    return cache.to(torch.float8_e4m3fn)


def _ours(name: str, stream: Any, caches: Caches) -> list[Entrant]:
    out, table, copies = caches.out(), None if name == OURS else caches.table, caches.copies_of(name)

    def run(index: int) -> None:
        attention_decode(caches.q, *copies[index % len(copies)], caches.seqlens, page_table=table, out=out)

    return [caches.entrant(name, run, out)]


def _sdpa(name: str, backend: str, stream: Any, caches: Caches) -> list[Entrant]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    sdp_backend, out = getattr(SDPBackend, backend), caches.out()
    copies = [tuple(each.transpose(1, 2) for each in pair) for pair in caches.contiguous]
    q = caches.q.transpose(1, 2)

    def compute(index: int) -> Any:
        with sdpa_kernel(sdp_backend):
            return torch.nn.functional.scaled_dot_product_attention(q, *copies[index % caches.copies], enable_gqa=True)

    out.copy_(compute(caches.copies - 1).transpose(1, 2))
    return [caches.entrant(name, compute, out)]


def _fa3(library: Any, stream: Any, caches: Caches) -> list[Entrant]:
    forward, out = fa3_forward(library), caches.out()

    def run(index: int) -> None:
        k, v = caches.contiguous[index % caches.copies]
        forward(caches.q, k, v, out=out, softmax_scale=GROUPED[2] ** -0.5, is_causal=False, num_splits=0)

    run(0)
    return [caches.entrant(FA3, run, out)]


def _fa4(stream: Any, caches: Caches) -> list[Entrant]:
    forward, out = fa4_forward(), caches.out()

    def run(index: int) -> None:
        forward(caches.q, *caches.contiguous[index % caches.copies], out=out)

    run(0)
    return [caches.entrant(FA4, run, out)]


def _flashinfer(*names: str) -> Rival:
    return lambda stream, caches: [_flashinfer_on(name, caches) for name in names]


def _flashinfer_on(name: str, caches: Caches) -> Entrant:
    import torch
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    heads, kv_heads, dim = GROUPED
    copies = caches.copies_of(name)
    batch, pages = caches.table.shape
    tensor_cores = name != FLASHINFER_CUDA_CORES
    wrapper = BatchDecodeWithPagedKVCacheWrapper(flashinfer_workspace(name), "NHD", use_tensor_cores=tensor_cores)
    device = caches.table.device
    begins = torch.arange(batch + 1, device=device, dtype=torch.int32) * pages
    last = torch.full((batch,), PAGE, device=device, dtype=torch.int32)
    kinds = {"q_data_type": caches.q.dtype, "kv_data_type": copies[0][0].dtype}
    wrapper.plan(begins, caches.table.flatten(), last, heads, kv_heads, dim, PAGE, **kinds)
    out = caches.out()
    flat_out = out.flatten(0, 1)

    def run(index: int) -> None:
        wrapper.run(caches.q.flatten(0, 1), copies[index % len(copies)], out=flat_out)

    run(0)
    return caches.entrant(name, run, out)


#: Values of --rivals, each with its name in the table, its package and its function.
OPTIONAL: dict[str, tuple[str, str, Rival]] = {
    "fa4": (FA4, "flash_attn.cute", _fa4),
    "flashinfer": (FLASHINFER, "flashinfer", _flashinfer(FLASHINFER, FLASHINFER_CUDA_CORES)),
}


def errors(caches: Caches, outs: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return the errors for a few sequences and the last copy of the cache; see attention.errors()."""
    import torch

    relative_errors, (k, v) = {}, caches.contiguous[-1]
    sequences = sorted({round(index * (caches.call.batch - 1) / (_SEQUENCES - 1)) for index in range(_SEQUENCES)})
    heads, kv_heads, dim = GROUPED
    for name, out in outs.items():
        exact_rows = []
        for sequence in sequences:
            keys, values = k[sequence], v[sequence]
            if name in (PAGED, FP8, FLASHINFER, FLASHINFER_CUDA_CORES, FLASHINFER_FP8):
                pages = caches.table[sequence].long()
                keys, values = (each[pages].flatten(0, 1) for each in caches.pages(caches.copies - 1))
            if name in IN_E4M3:
                keys, values = in_e4m3(keys), in_e4m3(values)
            q = caches.q[sequence, 0].double().reshape(kv_heads, heads // kv_heads, dim)
            logits = torch.einsum("hgd,khd->hgk", q, keys.double()) * dim**-0.5
            exact_rows.append(torch.einsum("hgk,khd->hgd", logits.softmax(-1), values.double()).reshape(heads, dim))
        exact = torch.stack(exact_rows)
        differences = out[sequences, 0].double() - exact
        rms = math.sqrt(float(exact.square().mean())) or 1.0
        relative_errors[name] = (
            math.sqrt(float(differences.square().mean())) / rms,
            float(differences.abs().max()) / rms,
        )
        if bool(out.isnan().any()):
            relative_errors[name] = (math.nan, math.nan)
    return relative_errors


def measure(stream: Any, call: Decoding, field: Mapping[str, Rival], replays: int) -> Cell:
    """Measure one call with all contenders."""
    caches = Caches(call)
    entrants, refused = find_entrants(stream, caches, field)
    ours, unable = find_entrants(stream, caches, {name: partial(_ours, name) for name in (OURS, PAGED, FP8)})
    refused |= unable
    cell = _facts(call)
    add_times(timing_method(stream, replays, REST_S), [*entrants, *ours], cell, refused, (OURS,))
    add_errors(cell, errors(caches, chosen_results(cell, [*entrants, *ours])), _ALLOWED)
    return cell


def _facts(call: Decoding) -> Cell:
    return {"batch": call.batch, "length": call.length, "bytes": call.bytes}


def _rates_line(cell: Cell, begin: str) -> str:
    return f"{begin}: {', '.join(f'{name} {us:.1f} ({_rate(cell, name):.2f})' for name, us in cell['us'].items())}"


def _rate(cell: Cell, name: str) -> float:
    """Return the rate at which keys and values are read, in TB/s."""
    return float(1e-6 * cell["bytes"] / (2 if name in IN_E4M3 else 1) / cell["us"][name])


def decode_table(cells: Sequence[Cell]) -> Table:
    """Return the microseconds and TB/s of each contender, and the speedup over the fastest competing library."""
    names = [*present(cells, RIVALS), *present(cells, (FLASHINFER_FP8, OURS, PAGED, FP8))]
    rows = []
    for cell in cells:
        us = cell.get("us", {})
        pairs = [f"{us[name]:.1f} ({_rate(cell, name):.2f})" if name in us else shown(None) for name in names]
        over = shown(times_as_fast(with_best(cell, RIVALS), BEST, OURS), 3)
        rows.append((f"{cell['batch']} x {cell['length']}", *pairs, over))
    return Table(("batch x keys", *names, f"{OURS} / {BEST}"), tuple(rows), "us (TB/s of keys and values)")


def decode_summary(cells: Sequence[Cell]) -> list[str]:
    """Compare our kernel with competing libraries, pages with a contiguous cache, and e4m3 pages with 16-bit pages."""
    cells = [with_best(cell, RIVALS) for cell in cells]
    pairs = [*((OURS, rival) for rival in (BEST, *RIVALS)), (PAGED, OURS), (FP8, PAGED), (FP8, FLASHINFER_FP8)]
    return [
        line
        for ours, rival in pairs
        for line in summary_line("decoding", cells, rival, lambda cell: f"{cell['batch']} x {cell['length']}", ours)
    ]


def calls_of(batches: Iterable[int], lengths: Sequence[int]) -> list[Decoding]:
    return [Decoding(batch, length) for batch in batches for length in lengths]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma bench attention_decode`` and return the exit status.

    The status is 1 if our kernel failed or a result was wrong.
    """
    parser = make_parser("attention_decode", __doc__)
    add = parser.add_argument
    add_rivals(parser)
    batches, lengths = (", ".join(map(str, each)) for each in (BATCHES, LENGTHS))
    add(
        "--batch",
        type=parse_length,
        action="append",
        metavar="N",
        help=f"number of sequences, repeatable (default: {batches})",
    )
    add(
        "--length",
        type=parse_length,
        action="append",
        metavar="N",
        help=f"number of keys, repeatable (default: {lengths})",
    )
    options = parser.parse_args(argv)
    require_gpu(parser)
    require_torch(parser)
    always = {
        CUDNN: partial(_sdpa, CUDNN, "CUDNN_ATTENTION"),
        FA2: partial(_sdpa, FA2, "FLASH_ATTENTION"),
        FA3: partial(_fa3, options.fa3),
    }
    field, versions = field_of(always, OPTIONAL, options.rivals)
    if FLASHINFER in field:
        field[FLASHINFER_FP8] = _flashinfer(FLASHINFER_FP8)
    settings = {"replays": options.replays, "rivals": versions, "page": PAGE}
    result = Result(settings, decode_table, options.json, decode_summary)
    calls = calls_of(options.batch or BATCHES, options.length or LENGTHS)
    with measuring_stream() as stream:
        measure_calls(result, calls, lambda call: measure(stream, call, field, options.replays), _facts, _rates_line)
    return result.finish("Attention, one query per sequence")


if __name__ == "__main__":
    raise SystemExit(main())
