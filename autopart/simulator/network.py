"""Messages on their way: a transfer starts when both ends have posted it, and shares the ports of its two processes.

The model of a process group, as gloo and NCCL do it:

- *Rendezvous.* Bytes move only once the sender has posted the send and the receiver the receipt.
- *One connection for each direction of a pair.* Messages from one process to another move one after the other.
- *Ports.* A device sends through one port and receives through another. Where the host copies (gloo), one thread of
  each process does both, so its two ports are one. Transfers that use a port at the same time share it evenly: the rate
  of a transfer is the bandwidth of its link over the number of transfers at its busier end.
- *Held senders.* Where the host copies, a send whose receipt is posted already is copied by the thread that posts it,
  which goes on when its bytes have moved (see `events`).
- A message arrives its link's latency after its last byte, once for each of its tensors, and never before one that went
  ahead of it on its connection; latency occupies nothing.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopart.simulator.actions import Message

Pair = tuple[int, int]


@dataclass(frozen=True)
class Transfer:
    """One message between two processes, from when both ends had posted it to its arrival."""

    message: Message
    source: int
    target: int
    bytes: float
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Wire:
    """What connects two processes: a message alone on it takes latency + bytes / bandwidth."""

    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = math.inf


@dataclass
class _Moving:
    message: Message
    sizes: Sequence[float]
    left: float
    start_s: float


class Network:
    """The transfers of one simulation, moved forward in time by its event loop.

    Args:
        wire: The connection from one process to another.
        by_host: Whether the processes' own threads copy the messages (gloo), or their devices do (NCCL).
    """

    def __init__(self, wire: Callable[[int, int], Wire], by_host: bool) -> None:
        self._wire, self.by_host = wire, by_host
        self._queues: dict[Pair, deque[_Moving]] = {}
        self._reached_s: dict[Pair, float] = {}
        self._now = 0.0

    def start(self, message: Message, source: int, target: int, sizes: Sequence[float], now: float) -> None:
        """Both ends have posted a message of tensors of `sizes` bytes."""
        self._move(now)
        self._queues.setdefault((source, target), deque()).append(_Moving(message, sizes, sum(sizes), now))

    def next_s(self) -> float:
        """When the next message has moved its last byte, if nothing else starts; infinity without messages."""
        rates = self._rates()
        return min(
            (self._now + _over(self._queues[pair][0].left, rate) for pair, rate in rates.items()), default=math.inf
        )

    def finish(self, now: float) -> list[Transfer]:
        """Move to a time that `next_s` gave; the messages that have moved their last byte by then."""
        due = [p for p, rate in self._rates().items() if self._now + _over(self._queues[p][0].left, rate) <= now]
        self._move(now)
        finished = []
        for source, target in due:
            queue = self._queues[source, target]
            moved = queue.popleft()
            if not queue:
                del self._queues[source, target]
            # What has no tensors has the token, which holds the stages together (see `autopart.runtime.boundary`).
            arrival = now + self._wire(source, target).latency_s * max(1, len(moved.sizes))
            arrival = self._reached_s[source, target] = max(arrival, self._reached_s.get((source, target), 0.0))
            finished.append(Transfer(moved.message, source, target, sum(moved.sizes), moved.start_s, arrival))
        return finished

    def _rates(self) -> dict[Pair, float]:
        """Bytes per second of the message at the head of each queue."""
        busy: Counter[tuple[int, bool]] = Counter()
        for pair in self._queues:
            busy.update(self._ports(pair))
        return {
            pair: self._wire(*pair).bandwidth_bytes_per_s / max(busy[port] for port in self._ports(pair))
            for pair in self._queues
        }

    def _ports(self, pair: Pair) -> tuple[tuple[int, bool], tuple[int, bool]]:
        source, target = pair
        return (source, True), (target, self.by_host)

    def _move(self, now: float) -> None:
        for pair, rate in self._rates().items():
            head = self._queues[pair][0]
            passed = now - self._now
            head.left = 0.0 if math.isinf(rate) else max(0.0, head.left - rate * passed)
        self._now = now


def _over(size: float, rate: float) -> float:
    return size / rate if size else 0.0
