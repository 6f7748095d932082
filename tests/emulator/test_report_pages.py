"""Pages, SARIF files and notebook views of reports; merged causes; names of arrays and shared variables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from html_text import Reader, assert_alone, assert_closed, assert_fragment

import cudatma
from cudatma import cli
from cudatma.build.ptx_source import ptx_source
from cudatma.emulator import Comparison, Report, Trace, load, report_page, report_sarif
from cudatma.errors import HazardError

REVERSE = """\
// Two reads race with the write. <script>alert("source")</script>
extern "C" __global__ void reverse(const float* x, float* y) {
    __shared__ float tile[64];
    tile[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = tile[63 - threadIdx.x];
    y[threadIdx.x + 64] = tile[62 - threadIdx.x & 63];
}
extern "C" __global__ void shift(float* y) {
    if (threadIdx.x == 0) y[70] = 1;
    if (threadIdx.x == 32) y[0] = y[70];
}
extern "C" __global__ void ahead(const float* x, float* y) {
    __shared__ float4 tile[16];
    if (threadIdx.x >= 16) return;
    const unsigned to = __cvta_generic_to_shared(&tile[threadIdx.x]);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" :: "r"(to), "l"(x + 4 * threadIdx.x) : "memory");
    y[threadIdx.x] = tile[threadIdx.x].x;
}
extern "C" __global__ void wait(float* y) {
    __shared__ unsigned long long full[2];
    const unsigned bar = __cvta_generic_to_shared(&full[1]);
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(bar) : "memory");
    __syncthreads();
    unsigned done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(bar) : "memory");
    y[threadIdx.x] = 1;
}
"""
HOSTILE = '"><script>alert(1)</script>'


def run(kernel: str, source: str = REVERSE, **options: Any) -> Report:
    compiled = ptx_source(source, target="sm_90a")
    arrays = (np.ones(64, np.float32), np.ones((2, 64), np.float32))
    args = arrays if kernel in ("reverse", "ahead") else arrays[1:]
    module = load(compiled.ptx, lines=compiled.lines)
    return module.launch(kernel, 1, 64, args, hazards="collect", trace=Trace(), **options)


def test_equal_causes_are_one_hazard() -> None:
    """Both reads lack the same barrier after the same write."""
    report = run("reverse")
    (race,) = [hazard for hazard in report.hazards if hazard.others[0].verb == "last written"]
    assert [race.source, *(other.source for other in race.also)] == ["kernel.cu:5", "kernel.cu:6"]
    assert race.others[0].source == "kernel.cu:4"
    assert "  also at PTX line " in str(report)
    assert report.findings.count(race.also[0]) == 1


def test_hazards_name_elements_and_variables() -> None:
    assert run("reverse").hazards[0].where.endswith(" of tile")
    (race,) = run("shift").hazards
    assert race.where == "y[1, 6]"
    assert "y[1, 6]; last written at" in race.message
    module = load(ptx_source(REVERSE, target="sm_90a").ptx)
    report = module.launch("shift", 1, 64, (np.ones(128, np.float32),), hazards="collect", names=["result"])
    assert report.hazards[0].where == "result[70]"


def test_a_page_shows_both_accesses_and_their_order() -> None:
    report = run("shift")
    page = report.to_html()
    assert_closed(page)
    assert_alone(page)
    (view,) = page.split("<article")[1:]
    assert '<li class="other"><b>9</b>' in view
    assert '<li class="this"><b>10</b>' in view
    assert "warp 0, lane 0 writes y[1, 6]" in view
    assert view.index("writes y[1, 6]</span>") < view.index("reads y[1, 6]</span>")
    assert "st.global" in view, "the PTX"
    without = replace(report, trace=None).to_html()
    assert "Order of events" in page
    assert "Order of events" not in without
    assert '<li class="other"><b>9</b>' in without


def test_a_page_shows_a_copy_in_flight() -> None:
    report = run("ahead", replay=1)
    assert [other.verb for other in report.hazards[0].others] == ["copied"]
    assert "copied at PTX line " in report.hazards[0].message
    page = report.to_html()
    assert '<li class="other"><b>16</b>' in page
    assert '<li class="this"><b>17</b>' in page
    assert page.index("cp.async group</span>") < page.index("reads byte 0 of tile</span>")


def test_a_page_shows_where_threads_wait_forever() -> None:
    text = " ".join(Reader(run("wait").to_html()).text.split())
    assert "waits for phase 0 of full[1], forever" in text
    assert "No warp can proceed" in text
    assert "mbarrier full[1]: phase 0" in text
    assert "Pipeline of wait" in text
    assert "grid 1x1x1, block 64x1x1, sm_90a" in text


def test_text_is_escaped_everywhere() -> None:
    report = run("reverse")
    report.title = report.place = HOSTILE
    report.printed, report.unchecked = [HOSTILE], [HOSTILE]
    report.compared = [Comparison(HOSTILE, 1.0, 0.5)]
    report.warnings = [replace(report.hazards[0], message=HOSTILE, where=HOSTILE, advice=HOSTILE, instruction=HOSTILE)]
    for page in (report_page([report, report]), report_page([report]), report._repr_html_()):
        assert "<script" not in page
        assert "alert" in Reader(page).text
    assert_fragment(report._repr_html_())


def test_one_page_and_one_log_hold_several_launches() -> None:
    reports = [run("reverse"), run("reverse"), run("shift", schedules=1)]
    reports.append(replace(reports[2], hazards=[]))
    reports[2].place = "program.py:12"
    page = report_page(reports)
    assert_closed(page)
    assert page.count("<article") == len(reports[0].hazards) + 1
    assert [page.count(f'href="#launch-{number}"') for number in (1, 2, 3, 4)] == [2, 0, 1, 0]
    assert page.count("<section id=") == 2, "equal and clean launches have no section"
    assert "program.py:12" in page
    results = json.loads(report_sarif(reports))["runs"][0]["results"]
    assert len(results) == 4, "the same hazard of two launches is one result"


#: Members of SARIF objects that the standard requires or that code scanning needs, with their types.
SARIF: dict[str, dict[str, type]] = {
    "log": {"version": str, "$schema": str, "runs": list},
    "run": {"tool": dict, "results": list},
    "driver": {"name": str, "rules": list},
    "rule": {"id": str, "shortDescription": dict, "fullDescription": dict, "help": dict},
    "result": {"ruleId": str, "ruleIndex": int, "level": str, "message": dict, "locations": list},
    "location": {"physicalLocation": dict},
}


def check_members(kind: str, value: dict[str, Any]) -> None:
    for name, member in SARIF[kind].items():
        assert type(value[name]) is member, f"{kind}.{name}"


def check_location(value: dict[str, Any]) -> tuple[str, int]:
    check_members("location", value)
    place = value["physicalLocation"]
    uri, line = place["artifactLocation"]["uri"], place["region"]["startLine"]
    assert isinstance(uri, str)
    assert not uri.startswith("/")
    assert type(line) is int
    assert line >= 1
    return uri, line


def check_sarif(text: str) -> list[dict[str, Any]]:
    """Check the essential parts of SARIF 2.1.0, and return the results."""
    log = json.loads(text)
    check_members("log", log)
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    check_members("run", run)
    check_members("driver", run["tool"]["driver"])
    rules = run["tool"]["driver"]["rules"]
    for rule in rules:
        check_members("rule", rule)
        assert all(isinstance(rule[name]["text"], str) for name in ("shortDescription", "fullDescription", "help"))
    assert len({rule["id"] for rule in rules}) == len(rules)
    for result in run["results"]:
        check_members("result", result)
        assert result["level"] in ("error", "warning")
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["message"]["text"]
        for location in (*result["locations"], *result["relatedLocations"]):
            check_location(location)
        ids = [location["id"] for location in result["relatedLocations"]]
        assert ids == list(range(len(ids)))
        assert all(isinstance(value, str) for value in result["partialFingerprints"].values())
    return list(run["results"])


def test_sarif_has_a_result_for_each_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["emulate", "k.cu", "--entry", "reverse", "--block", "64", "--arg", "x:float32[64]=ones"]
    command += ["--arg", "y:float32[128]", "--sarif", "k.sarif", "--html", "pages/k.html"]
    fingerprints = []
    for text in (REVERSE, f"\n\n{REVERSE}"):
        Path("k.cu").write_text(text)
        assert cli.main(command) == 1
        results = check_sarif(Path("k.sarif").read_text())
        fingerprints.append([result["partialFingerprints"] for result in results])
    places = [check_location(result["locations"][0]) for result in results]
    assert {("k.cu", 7), ("k.cu", 8)} <= set(places)
    assert all(check_location(result["relatedLocations"][0])[0] == "k.cu" for result in results)
    assert fingerprints[0] == fingerprints[1], "lines above a hazard do not change it"
    assert "data_race" in Path("pages/k.html").read_text()


def test_sarif_of_warnings_of_ptx_and_of_a_clean_launch() -> None:
    report = run("shift")
    (race,) = report.hazards
    unknown = replace(race, source="", others=())
    (result,) = check_sarif(replace(report, hazards=[], warnings=[unknown]).to_sarif())
    assert result["level"] == "warning"
    assert check_location(result["locations"][0]) == ("shift.ptx", race.ptx_line)
    assert check_sarif(replace(report, hazards=[]).to_sarif()) == []


def test_an_error_holds_its_report() -> None:
    compiled = ptx_source(REVERSE, target="sm_90a")
    with pytest.raises(HazardError) as caught:
        load(compiled.ptx).launch("shift", 1, 64, (np.ones(128, np.float32),))
    assert list(caught.value.hazards) == caught.value.report.hazards


def test_notebooks_show_kernels_maps_and_traces() -> None:
    kernel = cudatma.compile(REVERSE, target="sm_90a", entry="wait")
    kernel.smem_layout = ((HOSTILE, 0, 16),)
    assert f"0: {HOSTILE}, 16 bytes" in assert_fragment(kernel._repr_html_())
    assert "registers per thread" in assert_fragment(kernel.report()._repr_html_())
    box = cudatma.TensorMap.from_array(np.ones((8, 64), np.float16), box=(8, 64), encoder="codec")
    assert "bytes of a box1024" in "".join(assert_fragment(box._repr_html_()).split("\n")).replace("  ", "")
    trace = run("wait").trace
    assert trace is not None
    assert "Pipeline of wait" in assert_fragment(trace._repr_html_())
