"""Scheduling of splits and of the completion of asynchronous work, according to a seeded, adversarial schedule.

Schedule 0 is in order: each warp runs as long as it can, copies complete immediately, and CTAs start one after another.
Schedule 1 delays as much as possible: copies complete only when no split can run, each try_wait times out once before
it blocks, and the last CTAs start first. All other schedules make these decisions at random, based on the seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

from cudatma.emulator.errors import StepLimitError
from cudatma.emulator.machine.divergence import arrive, release_parked
from cudatma.emulator.machine.loops import Recorder
from cudatma.emulator.machine.retries import Retries, Stall
from cudatma.emulator.machine.state import BLOCK, SWITCH, Split
from cudatma.errors import counted

#: Number of idle rounds in a schedule before the scheduler helps polling loops with a limited number of attempts.
STARVATION = 2000
#: Counts of live clusters from which a random schedule chooses.
WIDTHS = (1, 2, 4, 8)
#: Number of segments after which another cluster starts, because the live clusters may be waiting for it.
PATIENCE = 20000
#: Number of steps between two checks for progress, and number of steps between two checks of a recording.
LOOK_PERIOD, RECORD_PERIOD = 10_000, 1000
#: Maximum time slice during a recording, so that every split runs.
RECORD_SLICE = 256
#: Maximum number of loops in an error message.
MAX_LOOPS = 4
#: Number of steps after the step limit in which loops are recorded.
LAST_STEPS = 4096
#: Number of segments that a poll of an unchanged flag adds to the count for PATIENCE.
SPIN = 200


class Grid(Protocol):
    """Part of a launch that the scheduler uses."""

    resident: list[Any]

    def admit(self) -> bool: ...
    def admit_beyond(self) -> bool: ...
    def pass_time(self) -> bool: ...
    def show_steps(self, steps: int) -> None: ...


class Deadlock(Exception):  # noqa: N818
    """No split can proceed, and no asynchronous work is pending.

    ``blocked`` contains all remaining splits. ``loops`` is a recording of the loops of splits that are still running.
    """

    def __init__(self, blocked: list[Split], loops: Recorder | None = None) -> None:
        super().__init__(f"{len(blocked)} groups of lanes wait forever")
        self.blocked, self.loops = blocked, loops

    @property
    def is_endless(self) -> bool:
        """Return whether a split is still running in an infinite loop."""
        return any(split.waits_for is None for split in self.blocked)


class Scheduler:
    """Scheduler of the splits of all live clusters.

    ``progress`` counts the events that may have released a waiter. ``unchanged`` counts releases of barriers and stores
    of equal values, which do not change a value.
    """

    def __init__(self, launch: Grid, schedule: int, seed: int, step_limit: int) -> None:
        self.launch = launch
        self.schedule, self.seed = schedule, seed
        self.random = random.Random(f"{seed}:{schedule}")
        self.ready: list[Split] = []
        self.blocked: dict[int, Split] = {}
        self.pending: list[Callable[[], None]] = []
        self.steps, self.step_limit = 0, step_limit
        self.progress, self.unchanged = 0, 0
        self.is_polling = False
        self.spun = 0
        self.in_order, self.most_delayed = schedule == 0, schedule == 1
        self._completing = self._may_switch = False
        #: Split that is running or ran last.
        self.running: Split | None = None
        is_drawn = not (self.in_order or self.most_delayed)
        #: Second generator, for the order of CTAs and for timeouts.
        self._draw = random.Random(f"{seed}:{schedule}:starts")
        self._width = self._draw.choice(WIDTHS) if is_drawn else 1
        self.retries = Retries(0.5 if is_drawn else float(self.most_delayed), self._draw)
        self._stall = Stall()
        self.has_stalled = False
        self._starved = 0
        #: Current recording. Recording starts when progress stops.
        self._recorder: Recorder | None = None
        self._next_look, self._look_period = LOOK_PERIOD, LOOK_PERIOD
        #: Number of changes at the last check, and progress at the last release of waits that may time out.
        self._looked_at, self._released_at = -1, -1
        #: Whether the step limit has been reached.
        self._is_over = False

    # ---- splits

    def add(self, split: Split) -> None:
        self.ready.append(split)

    def drop(self, split: Split) -> None:
        """Remove a split that has ended."""
        if split in self.ready:
            self.ready.remove(split)
        self.blocked.pop(id(split), None)

    def block(self, split: Split, reason: Any) -> int:
        """Block the running split until the code that releases it calls wake()."""
        split.waits_for = reason
        split.warp.guard = None
        self.ready.remove(split)
        self.blocked[id(split)] = split
        split.warp.events.blocked(split, reason)
        return BLOCK

    def wake(self, waiters: list[Split]) -> None:
        """Make these splits ready and empty the list."""
        self.progress += 1
        for split in waiters:
            if self.blocked.pop(id(split), None) is not None:
                split.waits_for = None
                split.polls = 0
                self.ready.append(split)
                split.warp.events.woken(split)
        waiters.clear()

    def synchronize(self, waiters: list[Split]) -> None:
        """Wake the waiters of a barrier. Unlike wake(), this method does not count as a change of a value."""
        self.wake(waiters)
        self.unchanged += 1

    def store(self, is_same: Callable[[], bool]) -> None:
        """Count a store before it executes. ``is_same`` returns whether memory already contains the values."""
        if self.progress - self.unchanged == self._looked_at and is_same():
            self.unchanged += 1
        self.progress += 1

    def poll(self, split: Split) -> None:
        """Yield to other splits because the running split has polled without success."""
        split.polls += 1
        self.is_polling = True

    def synchronized(self) -> None:
        """In random schedules, sometimes yield to other splits after a strong access."""
        if self._may_switch and self._draw.random() < 0.5:
            self.is_polling = True

    def spin(self, split: Split, wait: Any) -> None:
        """Yield because the running split has read an unchanged flag. ``wait`` provides ``at`` and describe()."""
        self.spun += SPIN
        split.last_poll = split.warp.last_poll = wait
        self.poll(split)

    # ---- asynchronous work

    def submit(self, action: Callable[[], None]) -> None:
        """Submit an asynchronous action, which is executed at a time that depends on the schedule."""
        if self.in_order and not self._completing:
            self._completing = True
            try:
                action()
                while self.pending:
                    self.pending.pop(0)()
            finally:
                self._completing = False
            self.progress += 1
        else:
            self.pending.append(action)

    def _complete_one(self) -> bool:
        if not self.pending:
            return False
        if self.most_delayed:
            action = self.pending.pop(0)
        else:
            action = self.pending.pop(self.random.randrange(len(self.pending)))
        self.progress += 1
        action()
        return True

    # ---- the loop

    def run(self) -> None:
        """Run until all clusters have exited. Raise Deadlock, StepLimitError, or the exception of an instruction."""
        idle, seen, admitted_at = 0, -1, 0
        rate = self.random.choice((0.02, 0.15, 0.5))
        launch = self.launch
        while True:
            while len(launch.resident) < self._width and launch.admit():
                pass
            if not self.ready:
                if self._complete_one() or launch.admit():
                    continue
                if not self.blocked:
                    return
                self._unlock()
                continue
            # The grid is idle if every ready split has polled without success since the last progress.
            is_idle = self.is_polling and seen == self.progress and all(split.polls for split in self.ready)
            idle, seen = idle + 1 if is_idle else 0, self.progress
            if idle > len(self.ready):
                idle = 0
                self._help_pollers()
            # In an idle grid, each split runs to its next poll before the scheduler intervenes.
            is_idle = idle > 0 and seen == self.progress
            self._quantum(self.ready[0] if is_idle else self._choose(), is_idle)
            if not self.in_order and not self.most_delayed and self.pending and self.random.random() < rate:
                self._complete_one()
            if self.steps + self.spun - admitted_at > PATIENCE:
                admitted_at = self.steps + self.spun
                if not self._complete_one():
                    launch.admit()
            if self.steps > self._next_look and not self._is_over:
                self._look_for_loops()

    def _look_for_loops(self) -> None:
        """Raise Deadlock if all ready splits are in infinite loops and no other event is possible.

        If nothing has changed since the last check, record the next steps until all splits have returned to the
        states in which the recording began, or a split fails to return. A failure doubles the time to the next check.
        While nothing changes, the state of a split determines its next steps. A split that returns to an earlier state
        therefore repeats its loop forever in every schedule.
        """
        self.launch.show_steps(self.steps)
        changes = self.progress - self.unchanged
        if changes != self._looked_at:
            self._looked_at, self._look_period = changes, LOOK_PERIOD
            self._record(None)
        elif self._recorder is None:
            self._record(Recorder(self.ready, self.blocked.values()))
        elif self._recorder.is_cycle:
            recorder = self._recorder
            self._record(None)
            actions = self._complete_one, self._admit_more, self._release_parked, self._release_once, self._pass_time
            if not any(help() for help in actions):
                raise Deadlock([*self.blocked.values(), *self.ready], recorder)
        elif self._recorder.has_failed:
            self._look_period *= 2
            self._record(None)
        self._next_look = self.steps + (self._look_period if self._recorder is None else RECORD_PERIOD)

    def _admit_more(self) -> bool:
        """Double the number of live clusters, which may be waiting for new clusters. Return whether any started."""
        started = [self.launch.admit() for _ in range(len(self.launch.resident))]
        return any(started) or self.launch.admit_beyond()

    def _release_once(self) -> bool:
        """Let blocked waits time out, at most once before the next progress. Return whether any wait timed out."""
        is_new = self._released_at != self.progress
        self._released_at = self.progress
        return is_new and self._release_suspended()

    def _pass_time(self) -> bool:
        """Advance the clock if threads read it. Return whether it has advanced."""
        passes = self.launch.pass_time()
        self.has_stalled |= passes
        return passes

    def _record(self, recorder: Recorder | None) -> None:
        """Start a recording, or end it if ``recorder`` is None."""
        self._recorder = recorder

    def _help_pollers(self) -> None:
        """Perform an action that may end the polling of all ready splits."""
        if self._starved < STARVATION:
            self._starved += 1
            if not self._stall.repeats(self.progress, self.steps, self.ready):
                return
        if self._complete_one() or self.launch.admit():
            return
        # A poll of an mbarrier cannot depend on a cluster that has not started. Other polls can.
        if any(not hasattr(split.last_poll, "barrier") for split in self.ready) and self.launch.admit_beyond():
            return
        if not self._release_suspended("is_joint"):
            self._unlock()

    def _release_parked(self) -> bool:
        """Let lanes that wait at a reconvergence point continue while other lanes poll. Return whether any continue.

        Every thread must make progress. For example, a lane that holds a lock must be able to release it while other
        lanes of its warp try to acquire it. Source: CUDA C++ Programming Guide, "Independent Thread Scheduling".
        """
        released = [release_parked(warp) for warp in {split.warp: None for split in self.ready}]
        self.progress += any(released)
        return any(released)

    def _unlock(self) -> None:
        """Let time pass or waits time out because no split can proceed, or raise Deadlock if neither is possible."""
        if self._release_parked():
            return
        self.has_stalled = True
        if not self._pass_time():
            waiting = [*self.blocked.values(), *self.ready]
            if self._stall.repeats(self.progress, self.steps, waiting):
                raise Deadlock(waiting)
        if not self._release_suspended() and not self.ready:
            raise Deadlock(list(self.blocked.values()))

    def pick(self, count: int) -> int:
        """Return the index of the next cluster to start among ``count`` candidates."""
        if self.in_order or self.most_delayed:
            return 0 if self.in_order else count - 1
        return self._draw.randrange(count) if self._draw.random() < 0.5 else 0

    def _release_suspended(self, which: str = "may_time_out") -> bool:
        """Let every blocked try_wait time out once, as hardware does. Return whether any wait timed out."""
        released = [split for split in self.blocked.values() if getattr(split.waits_for, which, False)]
        for split in released:
            split.timed_out = True
            barrier = getattr(split.waits_for, "barrier", None)
            if barrier is not None:
                barrier.waiters.remove(split)
            split.waits_for = None
            self.blocked.pop(id(split))
            self.ready.append(split)
        return bool(released)

    def _end_at_limit(self) -> None:
        """Record more steps, and then raise StepLimitError with the loops that these steps contain."""
        if not self._is_over:
            self._is_over = True
            self.step_limit += LAST_STEPS
            self._record(Recorder((), ()))
            return
        loop = _where(self._recorder) if self._recorder is not None else ""
        raise StepLimitError(
            f"the kernel has not completed after {self.steps} steps (schedule {self.schedule}, seed {self.seed}): "
            f"it has an infinite loop{loop and ' ' + loop}, or step_limit is too low"
        )

    def _choose(self) -> Split:
        if self.in_order or self.most_delayed:
            return self.ready[0]
        return self.ready[self.random.randrange(len(self.ready))]

    def _quantum(self, split: Split, is_whole: bool) -> None:
        """Run a split until it blocks, ends, polls, or exhausts its time slice.

        ``is_whole`` selects the long time slice of schedules 0 and 1.
        """
        warp = split.warp
        warp.split = self.running = split
        program, registers = split.frame.program, split.frame.registers
        is_whole = is_whole or self.in_order or self.most_delayed
        self._may_switch = not is_whole
        slice_steps = 4096 if is_whole else 1 + int(self.random.expovariate(0.03))
        begins = warp.events.segment_begins
        if self._recorder is not None:
            slice_steps = min(slice_steps, RECORD_SLICE)
            begins = self._recorder.segment_begins
        self.is_polling = False
        polls = split.polls
        for _ in range(slice_steps):
            self.steps += 1
            pc = split.pc
            if split.is_full:
                function = program.full[pc] or program.compile_full(pc)
            else:
                function = program.masked[pc] or program.compile_masked(pc)
            begins(split, pc)
            following = function(warp, registers, split.mask)
            if following < 0:
                if following == SWITCH and self.steps <= self.step_limit:
                    return
                break
            split.pc = following
            join = split.join
            if join is not None and join.at == following and join.frame is split.frame:
                arrive(warp, split)
                return
            if self.is_polling:
                break
        if self.steps > self.step_limit:
            if self._stall.progress == self.progress:
                raise Deadlock([*self.blocked.values(), *self.ready])
            self._end_at_limit()
        if split.polls == polls:
            split.polls = 0
        if split.waits_for is None and split in self.ready:
            self.ready.remove(split)
            self.ready.append(split)


def _where(recorder: Recorder) -> str:
    """Return the lines of the recorded loops and the warps that execute them, or "" if there are no loops."""
    warps: dict[str, list[Any]] = {}
    for warp in recorder.warps():
        loop = recorder.loop(warp)
        if loop is not None:
            warps.setdefault(loop.describe(), []).append(warp)
    descriptions = []
    for lines, members in warps.items():
        more = f" and {counted(len(members) - 1, 'more warp')}" if len(members) > 1 else ""
        descriptions.append(f"through {lines} (block {members[0].block.index} warp {members[0].index}{more})")
    return ", and ".join(descriptions[:MAX_LOOPS])
