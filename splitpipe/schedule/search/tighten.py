"""Shortens a whole schedule by swapping neighbours on the longest path, as in job shops, by simulated annealing.

The ops are a graph: each waits for the one before it on its device, and for one on another device. A swap of two
neighbours changes three edges of the first kind. Only swaps on the longest path can shorten it.

    device 0    ... a  u  v  b ...    to    ... a  v  u  b ...

The ops after the swap are simulated again, in an order that fits the edges (van Laarhoven, Aarts and Lenstra, "Job Shop
Scheduling by Simulated Annealing", 1992). Memory follows from a device's own order, and never exceeds its limit.
"""
from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from splitpipe.schedule.search.word import F, Problem, W, Word


def tightened(
    problem: Problem,
    words: Sequence[Word],
    work: int,
    seed: int,
    goal: float = 0.0,
    fixed: Sequence[range] | None = None,
    heat: float = 0.8,
) -> tuple[float, list[Word]]:
    """The span and words of the shortest schedule that annealing finds, from words that can run and fit into memory.

    ``work``: how many ops may be looked at; ``goal``: a span that is short enough; ``fixed``: for each device, places
    of its word that stay as they are, which no swap crosses; ``heat``: the initial temperature, in mean op times.
    """
    random = Random(seed).random
    graph = _Graph(problem, words, fixed)
    best, saved = graph.span, list(words)
    hot = heat * problem.pace or 1.0
    total = work
    path = graph.path(random)
    while work > 0 and path and best > goal * (1 + 1e-12):
        u = path[int(random() * len(path))]
        swap = graph.swapped(u)
        work -= 8
        if swap is None:
            continue
        work -= len(graph.order) - swap.first + len(graph.order) // 8
        change = swap.span - graph.span
        if change <= 0 or random() < math.exp(-change / (hot * 0.1 ** (1 - work / total))):
            graph.keep(swap)
            work -= len(path)
            if graph.span < best - 1e-9 * best:
                best, saved = graph.span, graph.words()
            path = graph.path(random)
        else:
            graph.undo(swap)
    return best, saved


@dataclass(slots=True)
class _Swap:
    """A swap of u with v, the next op on its device: the order from ``first`` on, and what follows from it."""

    u: int
    v: int
    first: int
    old: list[int]
    new: list[int]
    ends: list[float] = field(default_factory=list)
    span: float = 0.0


class _Graph:
    """The ops, numbered letter * chunks + microbatch, and two dummies without predecessors."""

    def __init__(self, problem: Problem, words: Sequence[Word], fixed: Sequence[range] | None) -> None:
        chunks = problem.chunks
        count = len(problem.device_of) * chunks
        self.problem, self.count, self.chunks = problem, count, chunks
        self.copy = problem.costs.hop
        self.time = [time for time in problem.times for _ in range(chunks)] + [0.0, 0.0]
        # Neighbours on the device, and on others; ``count`` if there is none, or the number after that for ``source``.
        self.before, self.after = [count] * (count + 2), [count] * (count + 2)
        self.source, self.sink = [count + 1] * (count + 2), [count] * (count + 2)
        self.alive, self.zone = [0] * (count + 2), [0] * (count + 2)
        self.last: list[int] = []
        for letter, other in enumerate(problem.remote_need):
            for k in range(chunks if other >= 0 else 0):
                self.source[letter * chunks + k] = other * chunks + k
                self.sink[other * chunks + k] = letter * chunks + k
        for device, word in enumerate(words):
            self._lay(word, fixed[device] if fixed else range(0))
        self.order = self._sorted()  # Each op comes after those that it waits for.
        self.at = [0] * (count + 2)
        for position, op in enumerate(self.order):
            self.at[op] = position
        self.ends = [0.0] * (count + 1) + [-math.inf]
        self._play(self.ends, 0)
        self.span = self._span(self.ends)

    def _lay(self, word: Word, fixed: range) -> None:
        seen = [0] * len(self.problem.device_of)
        op, alive = self.count, 0
        for position, letter in enumerate(word):
            previous, op = op, letter * self.chunks + seen[letter]
            seen[letter] += 1
            self.before[op] = previous
            if previous < self.count:
                self.after[previous] = op
            alive += (letter % 3 == F) - (letter % 3 == W)
            self.alive[op] = alive
            if fixed:
                self.zone[op] = 1 if position < fixed.start else -1 if position in fixed else 2
        self.last.append(op)

    def _sorted(self) -> list[int]:
        count = self.count
        missing = [(self.before[op] < count) + (self.source[op] < count) for op in range(count)]
        ready = deque(op for op in range(count) if not missing[op])
        order = []
        while ready:
            op = ready.popleft()
            order.append(op)
            for other in (self.after[op], self.sink[op]):
                if other < count:
                    missing[other] -= 1
                    if not missing[other]:
                        ready.append(other)
        return order

    def _play(self, ends: list[float], first: int) -> None:
        before, source, time, copy = self.before, self.source, self.time, self.copy
        for op in self.order[first:]:
            a, b = ends[before[op]], ends[source[op]] + copy
            ends[op] = (a if a > b else b) + time[op]

    def _span(self, ends: list[float]) -> float:
        return max([ends[op] - head for op, head in zip(self.last, self.problem.heads)])

    def path(self, random: Callable[[], float]) -> list[int]:
        """The ops of a longest path for which the next op on their device waits."""
        ends, before, source, copy, count = self.ends, self.before, self.source, self.copy, self.count
        latest = [op for op, head in zip(self.last, self.problem.heads) if ends[op] - head == self.span]
        op = latest[int(random() * len(latest))]
        found = []
        while op < count:
            previous, other = before[op], source[op]
            a, b = ends[previous], ends[other] + copy
            if a > b or (a == b and random() < 0.5):
                op = previous
                if op < count:
                    found.append(op)
            else:
                op = other
        return found

    def swapped(self, u: int) -> _Swap | None:
        """Swaps an op with the next one on its device, if possible."""
        chunks, v = self.chunks, self.after[u]
        a, b = u // chunks, v // chunks
        if a == b or self.zone[u] != self.zone[v] or self.zone[u] < 0:
            return None
        if (a, b) in self.problem.tied and u % chunks == v % chunks:
            return None
        if a % 3 == W and b % 3 == F and self.alive[v] >= self.problem.caps[self.problem.device_of[a]]:
            return None
        self._link(u, v)
        swap = self._ordered(u, v)
        if swap is None:
            self._link(v, u)
            return None
        self.order[swap.first : swap.first + len(swap.new)] = swap.new
        swap.ends = self.ends.copy()
        self._play(swap.ends, swap.first)
        device = self.problem.device_of[a]
        if self.last[device] == v:
            self.last[device] = u
        swap.span = self._span(swap.ends)
        return swap

    def _ordered(self, u: int, v: int) -> _Swap | None:
        """Puts v, and the ops in between that it waits for, before u; None if u is one of these."""
        first, after, sink = self.at[u], self.after, self.sink
        old = self.order[first : self.at[v] + 1]
        needed, early, late = {v}, [v], []
        for op in reversed(old[:-1]):
            if after[op] in needed or sink[op] in needed:
                if op == u:
                    return None
                needed.add(op)
                early.append(op)
            else:
                late.append(op)
        return _Swap(u, v, first, old, early[::-1] + late[::-1])

    def keep(self, swap: _Swap) -> None:
        """Keeps a swap."""
        self.ends, self.span = swap.ends, swap.span
        for position, op in enumerate(swap.new, swap.first):
            self.at[op] = position
        u, v = swap.u, swap.v
        kind = u // self.chunks % 3
        self.alive[u], self.alive[v] = self.alive[v], self.alive[v] - (kind == F) + (kind == W)

    def undo(self, swap: _Swap) -> None:
        """Undoes a swap."""
        self.order[swap.first : swap.first + len(swap.old)] = swap.old
        self._link(swap.v, swap.u)
        device = self.problem.device_of[swap.u // self.chunks]
        if self.last[device] == swap.u:
            self.last[device] = swap.v

    def words(self) -> list[Word]:
        """The words of the current order."""
        words = []
        for op in self.last:
            word = []
            while op < self.count:
                word.append(op // self.chunks)
                op = self.before[op]
            words.append(word[::-1])
        return words

    def _link(self, u: int, v: int) -> None:
        """Puts v, which comes after u, before it."""
        a, b = self.before[u], self.after[v]
        if a < self.count:
            self.after[a] = v
        if b < self.count:
            self.before[b] = u
        self.before[v], self.after[v], self.before[u], self.after[u] = a, u, v, b
