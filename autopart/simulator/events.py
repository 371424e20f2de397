"""Event simulation of a step: every process runs its program, and waits where the program waits.

The program is torch's own (`actions.programs`); seconds of actions and the network are given. A process computes one
action at a time, hands batches of messages over without stopping (unless it has to copy them itself, see `network`),
and stops at a wait until the batch has arrived.
After the last instruction come the sum of tied gradients (a rendezvous of the processes that take part) and the
optimizer.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from autopart.simulator.actions import Action, Instruction, Kind, Message, Post, Program, Wait
from autopart.simulator.network import Network, Transfer

COMPUTING = ("F", "B", "I", "W", "update")


@dataclass(frozen=True)
class Event:
    """What a process does from start to end; stage and microbatch are -1 where it is of no single one."""

    process: int
    kind: Kind | Literal["wait", "send", "sync", "update"]
    start_s: float
    end_s: float
    stage: int = -1
    microbatch: int = -1

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Timeline:
    """A simulated step.

    Attributes:
        processes: How many.
        events: By process, then by start.
        transfers: By start.
        step_s: From the start of the step until the last process is done.
    """

    processes: int
    events: tuple[Event, ...]
    transfers: tuple[Transfer, ...]
    step_s: float

    def of(self, process: int) -> list[Event]:
        """The events of one process, in order."""
        return [e for e in self.events if e.process == process]

    def busy_s(self, process: int) -> float:
        """Seconds in which the process computes."""
        return math.fsum(e.seconds for e in self.of(process) if e.kind in COMPUTING)

    def wait_s(self, process: int) -> float:
        """Seconds in which the process is held up by messages or by the sum of tied gradients."""
        return math.fsum(e.seconds for e in self.of(process) if e.kind not in COMPUTING)

    def transfer_s(self, process: int) -> float:
        """Seconds in which a message of the process is on its way."""
        spans = sorted((t.start_s, t.end_s) for t in self.transfers if process in (t.source, t.target))
        total, reached = 0.0, -math.inf
        for start, end in spans:
            total += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return total

    def bubble(self, process: int) -> float:
        """The share of the step in which the process computes nothing."""
        return 1.0 - self.busy_s(process) / self.step_s if self.step_s else 0.0


class Deadlock(RuntimeError):
    """Every process waits for a message that no one will send."""


def replay(
    programs: Sequence[Program],
    seconds: Callable[[Action], float],
    sizes: Callable[[Message], Sequence[float]],
    network: Network,
    *,
    sync_s: Sequence[float] = (),
    update_s: Sequence[float] = (),
) -> Timeline:
    """Run the programs of all processes.

    Args:
        seconds: Of an action.
        sizes: Bytes of each tensor of a message.
        sync_s, update_s: For each process, the sum of tied gradients and the optimizer, in seconds.

    Raises:
        Deadlock: The programs cannot be run to their ends.
    """
    return _Replay(programs, seconds, sizes, network, sync_s, update_s).run()


class _Replay:
    def __init__(
        self,
        programs: Sequence[Program],
        seconds: Callable[[Action], float],
        sizes: Callable[[Message], Sequence[float]],
        network: Network,
        sync_s: Sequence[float],
        update_s: Sequence[float],
    ) -> None:
        self.programs = [[part for i in program for part in _in_order(i)] for program in programs]
        self.seconds, self.sizes, self.network = seconds, sizes, network
        count = len(programs)
        self.sync_s, self.update_s = (tuple(given) or (0.0,) * count for given in (sync_s, update_s))
        self.place = [0] * count
        self.stopped: dict[int, float] = {}
        self.held: dict[int, set[Message]] = {}
        self.posted: dict[Message, int] = {}
        self.missing: list[dict[int, int]] = [{} for _ in programs]
        self.batches: dict[Message, list[tuple[int, int]]] = {}
        self.done_s = [math.inf] * count
        self.events: list[Event] = []
        self.transfers: list[Transfer] = []
        self.queue: list[tuple[float, int, int | Transfer]] = []
        self.pushed = 0

    def run(self) -> Timeline:
        for process in range(len(self.programs)):
            self._push(0.0, process)
        while self.queue or self.network.next_s() < math.inf:
            moved = self.network.next_s()
            if moved <= (self.queue[0][0] if self.queue else math.inf):
                for transfer in self.network.finish(moved):
                    self._push(transfer.end_s, transfer)
                continue
            now, _, item = heapq.heappop(self.queue)
            if isinstance(item, Transfer):
                self._arrived(item, now)
            else:
                self._continue(item, now)
        stuck = [p for p, done in enumerate(self.done_s) if done == math.inf]
        if stuck:
            raise Deadlock(f"processes {stuck} wait for messages that never come")
        self._after_the_last_microbatch()
        events = sorted(self.events, key=lambda e: (e.process, e.start_s, e.end_s))
        step = max((e.end_s for e in events), default=0.0)
        return Timeline(len(self.programs), tuple(events), tuple(sorted(self.transfers, key=_span)), step)

    def _push(self, time_s: float, item: int | Transfer) -> None:
        self.pushed += 1
        heapq.heappush(self.queue, (time_s, self.pushed, item))

    def _continue(self, process: int, now: float) -> None:
        """Run a process up to its next computation, up to where it is stopped, or to its end."""
        program = self.programs[process]
        while self.place[process] < len(program):
            instruction = program[self.place[process]]
            if isinstance(instruction, Wait) and self.missing[process][instruction.batch]:
                self.stopped[process] = now
                return
            self.place[process] += 1
            if isinstance(instruction, Post):
                self._post(process, instruction, now)
                if process in self.held:
                    self.stopped[process] = now
                    return
            elif isinstance(instruction, Action):
                end = now + self.seconds(instruction)
                stage, kind, microbatch = instruction
                self.events.append(Event(process, kind, now, end, stage, microbatch))
                self._push(end, process)
                return
        self.done_s[process] = now

    def _post(self, process: int, post: Post, now: float) -> None:
        messages = (*post.sends, *post.receives)
        self.missing[process][post.batch] = self.missing[process].get(post.batch, 0) + len(messages)
        for message in messages:
            self.batches.setdefault(message, []).append((process, post.batch))
            if message not in self.posted:
                self.posted[message] = process
                continue
            other = self.posted.pop(message)
            sends = message in post.sends
            self.network.start(message, *((process, other) if sends else (other, process)), self.sizes(message), now)
            if sends and self.network.by_host:
                self.held.setdefault(process, set()).add(message)

    def _arrived(self, transfer: Transfer, now: float) -> None:
        self.transfers.append(transfer)
        for process, batch in self.batches.pop(transfer.message):
            self.missing[process][batch] -= 1
        for process in (transfer.source, transfer.target):
            if process in self.stopped and self._may_go(process, transfer.message):
                start = self.stopped.pop(process)
                kind: Literal["wait", "send"] = "send" if self.held.pop(process, None) is not None else "wait"
                if now > start:
                    self.events.append(Event(process, kind, start, now))
                self._continue(process, now)

    def _may_go(self, process: int, arrived: Message) -> bool:
        if process in self.held:
            self.held[process].discard(arrived)
            return not self.held[process]
        wait = self.programs[process][self.place[process]]
        return isinstance(wait, Wait) and not self.missing[process][wait.batch]

    def _after_the_last_microbatch(self) -> None:
        tied = [p for p, s in enumerate(self.sync_s) if s]
        together = max((self.done_s[p] for p in tied), default=0.0)
        for process, now in enumerate(self.done_s):
            if process in tied:
                end = together + self.sync_s[process]
                self.events.append(Event(process, "sync", now, end))
                now = end
            if self.update_s[process]:
                self.events.append(Event(process, "update", now, now + self.update_s[process]))


def _in_order(instruction: Instruction) -> tuple[Instruction, ...]:
    """A batch is posted message by message, and in all of torch's, sends come before receipts."""
    if isinstance(instruction, Post) and instruction.sends and instruction.receives:
        return Post(instruction.batch, instruction.sends, ()), Post(instruction.batch, (), instruction.receives)
    return (instruction,)


def _span(transfer: Transfer) -> tuple[float, float, Message]:
    return transfer.start_s, transfer.end_s, transfer.message
