"""Capture the results of random TMA operations on a GPU.

    python tests/emulator/capture_tma.py --cases 6000 --seed 1 --out FOLDER [--limit-traps 150] [--jobs 8]
    python tests/emulator/capture_tma.py --backend emulator ...       the same cases on the emulator

tma_h200.jsonl.gz in the folder has one case per line with its ``answer`` (tma_answer.py): hashes of shared and global
memory after the operation (with small changes in full), what the barrier counted, or the trap or refusal. The cases run
in child processes. A trap ends the child, and a new one continues after it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Import the checkout's package from any working directory.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tma_cases import Case, cases
from tma_kernel import TEMPLATE, TmaCase

from cudatma.build.nvrtc import compile_source
from cudatma.build.render import render

#: Seconds without an answer after which a child counts as hung.
PATIENCE_S = 40
#: A job gives up after this number of children in a row without an answer.
DEATHS = 3
#: Remaining cases of a kind are skipped after this number of traps.
TRAPS_OF_A_KIND = 80


def kind_of(case: Case) -> str:
    """Return the kind of a case; cases of one kind trap alike."""
    fields = case.get("map", {})
    family = "bulk" if not fields else f"{fields['kind']}{fields['interleave']}"
    action = [*case["op"].split("_"), ""][1]
    return f"{case['tag']} {family} {action if action in ('load', 'store', 'prefetch') else 'reduce'}"


class Capture:
    """The cases, their answers so far, and the number of traps."""

    def __init__(self, asked: list[Case], folder: Path, limit_traps: int) -> None:
        self.asked, self.folder, self.limit = asked, folder, limit_traps
        self.answers: dict[int, dict[str, Any]] = {}
        self.traps: Counter[str] = Counter()
        self.lock = threading.Lock()

    def note(self, answer: dict[str, Any]) -> None:
        with self.lock:
            self.answers[answer["n"]] = answer
            if answer["result"].startswith(("trap", "lost")):
                self.traps[kind_of(self.asked[answer["n"]])] += 1

    def skip(self, numbers: Iterable[int]) -> list[int]:
        """Return the numbers of the remaining cases, after answering kinds that trap too often as skipped."""
        left = []
        full = self.traps.total() >= self.limit
        for number in numbers:
            case = self.asked[number]
            if (full and case["tag"] not in ("random", "edit", "edit_bits")) or self.traps[
                kind_of(case)
            ] >= TRAPS_OF_A_KIND:
                self.note({"n": number, "result": "skipped"})
            else:
                left.append(number)
        return left

    def work(self, numbers: list[int], command: list[str]) -> None:
        """Run children one after the other until all numbers are answered."""
        deaths = 0
        while deaths < DEATHS and (numbers := self.skip([n for n in numbers if n not in self.answers])):
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            stdin, stdout, stderr = child.stdin, child.stdout, child.stderr
            if stdin is None or stdout is None or stderr is None:
                raise RuntimeError("a child without pipes")
            errors: list[str] = []
            reader = threading.Thread(target=lambda e=errors, s=stderr: e.append(s.read()), daemon=True)
            reader.start()
            stdin.write(json.dumps(numbers))
            stdin.close()
            timer = threading.Timer(PATIENCE_S, child.kill)
            timer.start()
            for line in stdout:
                timer.cancel()
                self.note(json.loads(line))
                timer = threading.Timer(PATIENCE_S, child.kill)
                timer.start()
            timer.cancel()
            child.wait()
            reader.join(5)
            left = [n for n in numbers if n not in self.answers]
            deaths = deaths + 1 if left == numbers else 0
            if left and child.returncode != 3:
                reason = ("".join(errors).strip().splitlines() or [f"exit status {child.returncode}"])[-1]
                self.note({"n": left[0], "result": f"lost: {reason[:300]}"})

    def write(self) -> Path:
        path = self.folder / "tma_h200.jsonl.gz"
        with gzip.open(path, "wt", encoding="utf-8") as out:
            for case in self.asked:
                if case["n"] not in self.answers:
                    continue
                answer = {k: v for k, v in self.answers[case["n"]].items() if k != "n"}
                out.write(json.dumps(case | {"answer": answer}, separators=(",", ":")) + "\n")
        return path

    def summary(self) -> str:
        """Return counts of the results, with their kind if they are not ordinary ones."""
        results = Counter(answer["result"] for answer in self.answers.values())
        lines = [f"{count:6} {result}" for result, count in results.most_common(20)]
        odd: Counter[str] = Counter()
        for number, answer in self.answers.items():
            if answer["result"] != "ok":
                odd[f"{kind_of(self.asked[number])}: {answer['result']}"] += 1
            elif not answer.get("done", 1) or answer.get("counted") == "over":
                odd[f"{kind_of(self.asked[number])}: not complete"] += 1
        lines += [f"{count:6} {what}" for what, count in sorted(odd.items())]
        return "\n".join([*lines, f"{len(self.asked) - len(self.answers)} not asked"])


def on_gpu(capture: Capture, jobs: int) -> None:
    """Run the cases on the GPU, in ``jobs`` children at a time."""
    from cudatma.target import detect

    target = detect()
    cubin, listed = capture.folder / "tma_case.cubin", capture.folder / "cases.json"
    cubin.write_bytes(compile_source(render(TEMPLATE, TmaCase(), target), target).cubin)
    listed.write_text(json.dumps(capture.asked))
    command = [sys.executable, str(Path(__file__).with_name("tma_worker.py")), str(cubin), str(listed)]
    shares = [list(range(job, len(capture.asked), jobs)) for job in range(jobs)]
    threads = [threading.Thread(target=capture.work, args=(share, command)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cubin.unlink()
    listed.unlink()


def on_emulator(capture: Capture, jobs: int) -> None:
    """Run the cases on the emulator in this process."""
    from tma_replay import EmulatedGpu

    gpu = EmulatedGpu()
    for case in capture.asked:
        capture.note(gpu.run(case))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-traps", type=int, default=150)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--backend", choices=("gpu", "emulator"), default="gpu")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    started = time.time()
    capture = Capture(list(cases(arguments.cases, arguments.seed)), arguments.out, arguments.limit_traps)
    (on_gpu if arguments.backend == "gpu" else on_emulator)(capture, arguments.jobs)
    path = capture.write()
    print(capture.summary())
    print(f"{len(capture.asked)} cases in {time.time() - started:.0f} s, {path} has {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
