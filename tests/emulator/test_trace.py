"""Traces: recorded events, valid Chrome trace JSON, and pictures that are well-formed, small and deterministic."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from ptx_of import module_of
from test_cluster_copies import EXCHANGE

from cudatma import get_target
from cudatma.emulator import Trace
from cudatma.emulator.trace.picture import AXIS_TITLE
from cudatma.emulator.trace.recording import Event
from cudatma.emulator.trace.stages import views
from cudatma.emulator.trace.svg import STAGE_COLOURS, contrast, ink_on, text_width, tint
from cudatma.errors import ArgumentError
from cudatma.kernels.registry import kernel

pytestmark = pytest.mark.usefixtures("without_ptxas")

HANG = """
extern "C" __global__ void k(const __grid_constant__ TensorMap map, float* out) {
    __shared__ __align__(128) float tile[64];
    __shared__ u64 barrier;
    const u32 bar = shared_address(&barrier);
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(bar, 512);  // the copy brings 256
        cp_async_bulk_tensor_1d_load(shared_address(tile), &map, bar, 0);
    }
    __syncthreads();
    mbarrier_wait_parity(bar, 0);
    out[threadIdx.x] = tile[threadIdx.x];
}"""


@cache
def traced(name: str, schedule: int, **sizes: Any) -> Trace:
    trace = Trace()
    kernel(name).sample(get_target("sm_90a"), **sizes).run(trace=trace, replay=schedule)
    return trace


def marlin(schedule: int = 3) -> Trace:
    return traced("marlin_mma_sync", schedule, m=16, n=64, k=1536)


def copying(schedule: int = 3) -> Trace:
    return traced("tile_copy", schedule, rows=300, columns=200)


def exchanging() -> Trace:
    trace = Trace()
    module_of(EXCHANGE).launch("k", 2, 32, (np.zeros((2, 96), np.uint32),), replay=4, trace=trace)
    return trace


def hanging(schedules: int = 3) -> Trace:
    from cudatma.descriptor import TensorMap

    source, trace = np.arange(64, dtype=np.float32), Trace()
    args = (TensorMap.from_array(source, (64,), encoder="codec"), np.zeros(32, np.float32))
    module_of(HANG).launch("k", 1, 32, args, arrays=(source,), schedules=schedules, hazards="collect", trace=trace)
    return trace


# ---- what is recorded


@pytest.mark.parametrize("schedule", [0, 1, 5])
def test_the_ring_of_a_kernel_is_recognized(schedule: int) -> None:
    """Six k-blocks of 256 pass through five stages; producer and consumers are distinguished."""
    (view,) = views(marlin(schedule))
    assert [len(stage.fills) for stage in view.stages] == [2, 1, 1, 1, 1]
    assert all(stage.empty is not None for stage in view.stages[:1])
    assert [view.role(warp) for warp in view.warps] == ["producer", *["consumer"] * 8]
    for stage in view.stages:
        for lap, fill in enumerate(stage.fills):
            assert fill.lap == lap
            assert fill.full is not None
            assert fill.begin <= min(copy.begin for copy in fill.copies) <= max(copy.end or 0 for copy in fill.copies)
            assert fill.full >= max(copy.end or 0 for copy in fill.copies)
    for warp in view.warps[1:]:
        assert [work.stage.number for work in view.works(warp)] == [0, 1, 2, 3, 4, 0]
        counts = {sum(event.count for event in work.products) for work in view.works(warp)}
        assert len(counts) == 1
        assert 0 not in counts


def test_rings_of_different_tensors_are_told_apart() -> None:
    """Queries, keys and values; one warp stores the results."""
    trace = traced("attention_a4", 3)
    view = views(trace)[0]
    assert [[stage.label for stage in ring] for ring in view.rings] == [["A"], ["B0", "B1"], ["C0", "C1"]]
    shown = texts(trace.to_svg())
    assert [text for text in shown if text in ("buffer A", "ring B", "ring C", "consumers", "stores")] == [
        "buffer A",
        "ring B",
        "ring C",
        "consumers",
        "stores",
    ]


def test_groups_of_cp_async_are_copies_in_flight() -> None:
    trace = traced("attention_a1", 3)
    groups = [event for event in trace.events if event.kind == "cp.async"]
    assert sum(event.size_bytes for event in groups if event.block == (0, 0, 0)) >= 3 * 64 * 64 * 2  # q, k and v
    assert all(event.end is not None and event.end >= event.begin for event in groups)
    assert {"producers, also consumers", "cp.async", "bytes in flight"} <= set(texts(trace.to_svg()))


def test_copies_in_order_take_no_time_and_delayed_ones_do() -> None:
    def flying(trace: Trace) -> list[int]:
        return [(event.end or 0) - event.begin for event in trace.events if event.kind == "copy"]

    assert set(flying(copying(0))) == {0}
    assert min(flying(copying(1))) > 0


def test_stores_belong_to_the_stage_that_they_read() -> None:
    view = views(copying())[0]
    stores = [event for event in view.events if event.kind == "store"]
    assert [view.stage_of_store(event).number for event in stores] == [n % 4 for n in range(len(stores))]  # type: ignore[union-attr]
    assert all(event.end is not None and event.end > event.begin for event in stores)


def test_a_copy_into_another_block_belongs_to_both() -> None:
    trace = exchanging()
    first, second = views(trace)
    (copy,) = second.of_warp(0, "copy")
    assert (copy.block, copy.issuer) == ((0, 0, 0), ((1, 0, 0), 0))
    assert copy in first.stages[0].fills[0].copies


def test_the_first_schedule_with_a_hazard_is_kept() -> None:
    trace = hanging()
    assert trace.schedule == 0
    assert {event.name for event in trace.events if event.kind == "hazard"} == {"byte_count", "deadlock"}
    open_waits = [event for event in trace.events if event.kind == "wait" and event.end is None]
    assert [event.warp for event in open_waits] == [0]


# ---- Chrome's format


def check_chrome(text: str) -> list[dict[str, Any]]:
    """Check the rules of the trace event format that viewers depend on, and return the events."""
    found = json.loads(text)
    assert set(found) == {"traceEvents", "displayTimeUnit", "otherData"}
    events: list[dict[str, Any]] = found["traceEvents"]
    threads, processes = set(), set()
    slices = defaultdict(list)
    pairs: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    last = 0.0
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            assert set(event["args"]) == {"sort_index" if event["name"].endswith("index") else "name"}
            (processes.add(event["pid"]), threads.add((event["pid"], event["tid"])))
            continue
        assert event["ts"] >= last >= 0
        last = event["ts"]
        if event["ph"] == "X":
            assert event["dur"] > 0
            slices[event["pid"], event["tid"]].append(event)
        elif event["ph"] in "besf":
            kind = "async" if event["ph"] in "be" else "flow"
            pairs[kind, event["cat"], event["id"]].append(event)
        elif event["ph"] == "C":
            assert all(value >= 0 for value in event["args"].values())
        else:
            assert (event["ph"], event["s"]) == ("i", "p")
    assert set(slices) <= threads
    assert {pid for pid, _ in slices} <= processes
    for own in slices.values():
        for before, after in pairwise(own):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-9, (before, after)
    for (kind, *_), both in pairs.items():
        assert [event["ph"] for event in both] == (["b", "e"] if kind == "async" else ["s", "f"])
        assert len({(event["pid"], event["name"]) for event in both}) == 1
        if kind == "flow":
            assert both[1]["bp"] == "e"
            for end in both:
                own = slices[end["pid"], end["tid"]]
                assert any(s["ts"] <= end["ts"] < s["ts"] + s["dur"] for s in own), end
    return events


@pytest.mark.parametrize(
    "make",
    [
        lambda: marlin(0),
        lambda: marlin(1),
        marlin,
        lambda: copying(0),
        copying,
        exchanging,
        hanging,
        lambda: traced("attention_a1", 3),
    ],
    ids=["in order", "delayed", "marlin_mma_sync", "copy in order", "copy", "cluster", "hang", "cp.async"],
)
def test_chrome_json_is_valid(make: Any) -> None:
    trace = make()
    events = check_chrome(trace.to_json())
    copies = [event for event in trace.events if event.kind == "copy"]
    begun = [event for event in events if event["ph"] == "b" and event["cat"] == "TMA copy"]
    assert len(begun) == len(copies)
    assert sum(event["args"]["bytes"] for event in begun) == sum(event.size_bytes for event in copies)


def test_arrows_lead_from_copy_to_phase_to_waiter() -> None:
    events = check_chrome(marlin().to_json())
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    ends = defaultdict(set)
    for event in events:
        if event["ph"] in "sf":
            ends[event["name"], event["ph"]].add(names[event["tid"]].split()[0])
    assert ends["completes", "s"] == {"warp"}
    assert ends["completes", "f"] == {"full"}
    assert ends["releases", "s"] == {"full", "empty"}
    assert ends["releases", "f"] == {"warp"}
    assert "warp 8: producer" in names.values()


def test_the_counter_never_counts_more_than_the_ring_holds() -> None:
    counted = [event["args"] for event in check_chrome(marlin().to_json()) if event["ph"] == "C"]
    assert max(value["in flight"] + value["full"] for value in counted) <= 5
    assert max(value["full"] for value in counted) > 1


# ---- pictures


def parsed(svg: str) -> ElementTree.Element:
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        if "x" in rect.attrib:
            assert -0.5 <= float(rect.attrib["x"]) <= width
            assert float(rect.attrib["x"]) + float(rect.attrib["width"]) <= width + 0.5
            assert 0 <= float(rect.attrib["y"]) + float(rect.attrib["height"]) <= height
    return root


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in parsed(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_a_picture_shows_producer_ring_and_consumers() -> None:
    shown = texts(marlin().to_svg())
    for text in (
        "producer",
        "warp 4",
        "bytes in flight",
        "ring of stages",
        "stage 3",
        "consumers",
        "warp 0",
        AXIS_TITLE,
    ):
        assert text in shown
    assert any(text.endswith("mma") for text in shown)
    assert any(text.startswith("full, phase") for text in shown)


SVG = "{http://www.w3.org/2000/svg}"
Box = tuple[float, float, float, float]


def box_of(text: ElementTree.Element) -> Box:
    """Return the approximate rectangle of a text: left, top, right, bottom."""
    size = float(text.attrib["font-size"])
    width = text_width(text.text or "", size) * (1.1 if "font-weight" in text.attrib else 1)
    x, y = float(text.attrib["x"]), float(text.attrib["y"])
    x -= width / 2 if text.attrib.get("text-anchor") == "middle" else 0
    return x, y - 0.75 * size, x + width, y + 0.25 * size


def overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def arrows_of(root: ElementTree.Element) -> list[Box]:
    """Return the rectangles of the thin lines that lead from a phase to the warp that waited for it."""
    found = []
    for line in root.iter(f"{SVG}line"):
        if line.attrib["stroke"] in STAGE_COLOURS:
            x, half = float(line.attrib["x1"]), float(line.attrib["stroke-width"]) / 2
            ends = sorted((float(line.attrib["y1"]), float(line.attrib["y2"])))
            found.append((x - half, ends[0], x + half, ends[1]))
    return found


@pytest.mark.sweep(6)
@pytest.mark.parametrize("width", [480, 1200])
@pytest.mark.parametrize(
    "make",
    [
        lambda: marlin(0),
        marlin,
        copying,
        exchanging,
        hanging,
        lambda: traced("marlin_mma_sync", 25, m=16, n=64, k=3072),
        lambda: traced("marlin_wgmma", 9),
        lambda: traced("marlin_wgmma", 9, k=2048),
        lambda: traced("transpose", 3),
        lambda: traced("attention_a4", 3),
    ],
    ids=["in order", "marlin_mma_sync", "copy", "cluster", "hang", "long", "wgmma", "long wgmma", "stores", "rings"],
)
def test_labels_are_inside_of_the_picture_and_touch_neither_arrows_nor_each_other(make: Any, width: int) -> None:
    root = parsed(make().to_svg(width=width, blocks=2))
    height = float(root.attrib["height"])
    boxes = [(box_of(text), text.text) for text in root.iter(f"{SVG}text")]
    arrows = arrows_of(root)
    for number, (box, text) in enumerate(boxes):
        assert 0 <= box[0] < box[2] <= width, text
        assert 0 <= box[1] < box[3] <= height, text
        assert not [arrow for arrow in arrows if overlap(box, arrow)], text
        assert not [other for b, other in boxes[:number] if overlap(box, b)], text


def test_the_geometric_test_sees_arrows() -> None:
    assert len(arrows_of(parsed(marlin().to_svg()))) > 5


def test_a_long_title_is_wrapped() -> None:
    shown = texts(marlin().to_svg(width=480, title="a long title of many words " * 8))
    assert sum(text.startswith("a long title") or "many words" in text for text in shown) > 2
    parsed(marlin().to_svg(width=480, title="x" * 500))


def test_a_label_can_be_read_on_every_color_of_a_stage() -> None:
    for colour in STAGE_COLOURS:
        for fill in (colour, tint(colour, 0.4)):
            assert contrast(fill, ink_on(fill)) >= 4.5, colour


@pytest.mark.parametrize("make", [lambda: marlin(0), exchanging, hanging, Trace])
def test_every_trace_can_be_drawn(make: Any) -> None:
    trace = make()
    parsed(trace.to_svg(width=700, blocks=2))
    check_chrome(trace.to_json())


def test_the_same_run_gives_the_same_files() -> None:
    first, again = marlin(), traced.__wrapped__("marlin_mma_sync", 3, m=16, n=64, k=1536)
    assert first.to_svg() == again.to_svg()
    assert first.to_json() == again.to_json()


def test_a_long_trace_is_cropped_and_says_so() -> None:
    trace = traced("tile_copy", 3, rows=3000, columns=300)
    whole, cropped = trace.to_svg(window=(0, trace.steps)), trace.to_svg()
    assert len(cropped) < 0.5 * len(whole)
    assert len(cropped) < 150_000
    about = texts(cropped)[1]
    assert about.startswith("emulated steps 0 to ")
    assert f"of {trace.steps}" in about
    assert texts(whole)[1].startswith(f"{trace.steps} emulated steps")
    assert "steps 100 to 300" in texts(trace.to_svg(window=(100, 300)))[1]
    late = trace.steps - 5
    trace.events.append(Event("hazard", "data_race", (0, 0, 0), 0, late, late))
    words = texts(trace.to_svg())[1].split()
    assert int(words[2]) < late < int(words[4]), "the window contains the hazard"


def test_a_hazard_is_flagged() -> None:
    svg = hanging().to_svg()
    assert svg.count("<polygon") == 3  # two of them, and the legend's
    assert "hazard" in texts(svg)


@pytest.mark.parametrize(
    "wrong", [{"width": 100}, {"width": "wide"}, {"blocks": 0}, {"window": (5, 5)}, {"window": (-1, 5)}]
)
def test_wrong_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError) as caught:
        copying().to_svg(**wrong)
    assert caught.value.field == next(iter(wrong))


def test_a_kernel_without_copies_can_be_drawn() -> None:
    trace, x = Trace(), np.zeros(64, np.float32)
    source = 'extern "C" __global__ void k(float* x) { x[threadIdx.x] = 1; }'
    module_of(source).launch("k", 1, 64, (x,), trace=trace)
    assert "warp 1" in texts(trace.to_svg())
    check_chrome(trace.to_json())
