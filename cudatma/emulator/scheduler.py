"""Who runs next, and when asynchronous work completes: one seeded, adversarial schedule.

Schedules: number 0 is in order (each warp runs as far as it can; copies complete at once), number 1 is most delayed
(copies complete only when nobody can run), the others draw both from the seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cudatma.emulator.errors import StepLimitError
from cudatma.emulator.machine import BLOCK, SWITCH, Split

if TYPE_CHECKING:
    from cudatma.emulator.launch import Launch

#: Rounds in which everybody only polled, after which a deadlock is reported.
IDLE_ROUNDS = 3
#: Segments after which another cluster is let in while the present ones still run (they may wait for it).
PATIENCE = 20000
#: Segments that a look at a flag which has not changed counts for, until another cluster is let in.
SPIN = 200


class Deadlock(Exception):  # noqa: N818
    """Nobody can run, nothing is under way. blocked: the splits that wait."""

    def __init__(self, blocked: list[Split]) -> None:
        super().__init__(f"{len(blocked)} groups of lanes wait for ever")
        self.blocked = blocked


class Scheduler:
    """Runs the splits of all resident clusters. ``progress`` counts what may have released a waiter."""

    def __init__(self, launch: Launch, schedule: int, seed: int, step_limit: int) -> None:
        self.launch = launch
        self.schedule, self.seed = schedule, seed
        self.random = random.Random(f"{seed}:{schedule}")
        self.ready: list[Split] = []
        self.blocked: dict[int, Split] = {}
        self.pending: list[Callable[[], None]] = []
        self.steps, self.step_limit = 0, step_limit
        self.progress = 0
        self.is_polling = False
        self.spun = 0
        self.in_order, self.most_delayed = schedule == 0, schedule == 1
        self._completing = False
        self.has_asked = False

    # ---- splits

    def add(self, split: Split) -> None:
        self.ready.append(split)

    def drop(self, split: Split) -> None:
        """A split that is no more."""
        if split in self.ready:
            self.ready.remove(split)
        self.blocked.pop(id(split), None)

    def block(self, split: Split, reason: Any) -> int:
        """The running split cannot go on; whoever releases it calls wake()."""
        split.waits_for = reason
        split.warp.guard = None
        self.ready.remove(split)
        self.blocked[id(split)] = split
        if self.launch.trace is not None:
            self.launch.trace.blocked(split, reason)
        return BLOCK

    def wake(self, waiters: list[Split]) -> None:
        """Let splits run again; the list is emptied."""
        self.progress += 1
        for split in waiters:
            if self.blocked.pop(id(split), None) is not None:
                split.waits_for = None
                split.polls = 0
                self.ready.append(split)
                if self.launch.trace is not None:
                    self.launch.trace.woken(split)
        waiters.clear()

    def poll(self, split: Split) -> None:
        """The running split asked for something that is not there yet and goes on: let others run."""
        split.polls += 1
        self.is_polling = True

    def spin(self, split: Split, wait: Any) -> None:
        """The running split looked at a flag and found what it had found before. wait: has ``at`` and describe()."""
        self.spun += SPIN
        split.last_poll = wait
        self.poll(split)

    # ---- asynchronous work

    def submit(self, action: Callable[[], None]) -> None:
        """Something that happens later, at a time the schedule picks."""
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
        """Until every cluster is done. Raises Deadlock, StepLimitError, TrapError and what programs raise."""
        idle, seen, admitted_at, released_at, fruitless = 0, -1, 0, -1, 0
        rate = self.random.choice((0.02, 0.15, 0.5))
        while True:
            if not self.ready:
                if self._complete_one() or self.launch.admit():
                    continue
                if not self.blocked:
                    return
                fruitless = fruitless + 1 if released_at == self.progress else 0
                released_at = self.progress
                if fruitless >= IDLE_ROUNDS and self.launch.pass_time():
                    fruitless = 0
                if fruitless >= IDLE_ROUNDS or not self._release_suspended():
                    raise Deadlock(list(self.blocked.values()))
                continue
            if all(split.polls for split in self.ready):
                idle = idle + 1 if seen == self.progress else 0
                seen = self.progress
                if idle > IDLE_ROUNDS * len(self.ready) and not self._help_pollers():
                    if not self._let_time_pass():
                        raise Deadlock([*self.blocked.values(), *self.ready])
                    idle = 0
            self._quantum(self._choose())
            if not self.in_order and not self.most_delayed and self.pending and self.random.random() < rate:
                self._complete_one()
            if self.steps + self.spun - admitted_at > PATIENCE:
                admitted_at = self.steps + self.spun
                if not self._complete_one():
                    self.launch.admit()

    def _help_pollers(self) -> bool:
        """Do what may end the polling of all that are ready; False where nothing is left to do."""
        return self._complete_one() or self.launch.admit() or self._release_suspended("is_joint")

    def _let_time_pass(self) -> bool:
        """For kernels that look at a clock: first let whoever is suspended look, then let time pass."""
        if self.launch.pass_time():
            self.has_asked = False
        elif self.has_asked or not self.launch.reads_clock:
            return False
        else:
            self.has_asked = True
        self._release_suspended()
        return True

    def _release_suspended(self, which: str = "may_time_out") -> bool:
        """Let every suspended try_wait time out once, as hardware does; True where there is one."""
        able = [split for split in self.blocked.values() if getattr(split.waits_for, which, False)]
        for split in able:
            split.timed_out = True
            split.waits_for = None
            self.blocked.pop(id(split))
            self.ready.append(split)
        return bool(able)

    def _choose(self) -> Split:
        if self.in_order or self.most_delayed:
            return self.ready[0]
        return self.ready[self.random.randrange(len(self.ready))]

    def _quantum(self, split: Split) -> None:
        """Run a split until it blocks, ends, polls, or has had its share."""
        warp = split.warp
        warp.split = split
        program, registers = split.frame.program, split.frame.registers
        share = 4096 if self.in_order or self.most_delayed else 1 + int(self.random.expovariate(0.03))
        self.is_polling = False
        polls = split.polls
        watch = self.launch.watch
        for _ in range(share):
            self.steps += 1
            pc = split.pc
            if split.is_full:
                function = program.full[pc] or program.compile_full(pc)
            else:
                function = program.masked[pc] or program.compile_masked(pc)
            if watch is not None:
                watch(split, pc)
            following = function(warp, registers, split.mask)
            if following < 0:
                if following == SWITCH and self.steps <= self.step_limit:
                    return
                break
            split.pc = following
            join = split.join
            if join is not None and join.at == following and join.frame is split.frame:
                warp.arrive(split)
                return
            if self.is_polling:
                break
        if self.steps > self.step_limit:
            raise StepLimitError(
                f"{self.steps} steps and no end (schedule {self.schedule}, seed {self.seed}): "
                "an endless loop, or step_limit= is too low"
            )
        if split.polls == polls:
            split.polls = 0
        if split.waits_for is None and split in self.ready:
            self.ready.remove(split)
            self.ready.append(split)
