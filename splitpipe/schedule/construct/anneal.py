"""Shortens a schedule by swapping neighbours on the longest path, as in job shops, by simulated annealing.

The ops are a graph: each waits for the one before it on its device, and for one on another device. A swap of two
neighbours changes three edges of the first kind. Only swaps on the longest path can shorten it.

    device 0    ... a  u  v  b ...    to    ... a  v  u  b ...

The ops after the swap are simulated again, in an order that fits the edges (van Laarhoven, Aarts and Lenstra, "Job Shop
Scheduling by Simulated Annealing", 1992). Memory follows from a device's own order, and never exceeds its limit.

To shorten the period that a schedule repeats, the same two ops are swapped in all periods.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import sub
from random import Random

from splitpipe.schedule.construct.problem import CHANGES, KINDS, F, Problem, W, Word, schedule_of
from splitpipe.schedule.play import OpOrder


def improve(
    problem: Problem, words: Sequence[Word], work: int, seed: int, heat: float = 0.4, size: int | None = None,
    more: int = 0, goal: float = 0.0,
) -> tuple[float, list[Word]]:
    """The span and words of the shortest schedule that annealing finds, from words that fit into memory.

    ``work``: how many ops may be looked at; ``heat``: the initial temperature, in mean op times; ``goal``: a span that
    is short enough; for others, see ``Graph``.
    """
    random = Random(seed).random
    graph = Graph(problem, words, size, more)
    best, saved = graph.span, list(words)
    if best == math.inf:
        return best, saved
    hot = heat * sum(problem.times) / len(problem.times) or 1.0
    total = work
    path = graph.path(random)
    while work > 0 and path and best > goal * (1 + 1e-12):
        work -= 8
        swap = graph.swap(path[int(random() * len(path))])
        if swap is None:
            continue
        work -= swap.work
        change = graph.span - swap.span
        if change <= 0 or random() < math.exp(-change / (hot * 0.1 ** (1 - work / total))):
            work -= len(path)
            if graph.span < best - 1e-9 * best:
                best, saved = graph.span, graph.words()
            path = graph.path(random)
        else:
            graph.undo(swap)
    return best, saved


@dataclass(slots=True)
class _Swap:
    """A swap: its pairs of ops, and what it replaced."""

    order: list[int]
    ends: list[float]
    span: float
    pairs: list[tuple[int, int]] = field(default_factory=list)
    work: int = 0  # The number of ops that it simulated.


class Graph:
    """The ops of words, numbered letter * chunks + microbatch, and when they end.

    ``size``: microbatches of the period that is shortened (default: all, so a swap is made once); ``more``: those that
    the span counts in addition, each with the time of the period.
    """

    def __init__(self, problem: Problem, words: Sequence[Word], size: int | None = None, more: int = 0) -> None:
        self.problem, self.chunks = problem, problem.chunks
        self.size, self.more = size or problem.chunks, more
        self.count = count = len(problem.device_of) * problem.chunks
        self.copy = problem.costs.hop
        self.time = [time for time in problem.times for _ in range(self.chunks)]
        # The op before and after on the device, the op elsewhere that it waits for, and that waits for it. If there is
        # none: ``count``, which ends at 0, or the number after that, which never delays.
        self.before, self.after = [count] * (count + 2), [count] * (count + 2)
        self.source, self.sink = [count + 1] * (count + 2), [count] * (count + 2)
        self.heads = [problem.heads[device] for device in problem.device_of]
        self.alive = [0] * (count + 2)  # The number of activations on the device after the op.
        for letter, needs in enumerate(problem.needs):
            for need in needs:
                if problem.device_of[need] != problem.device_of[letter]:
                    for k in range(self.chunks):
                        self.source[letter * self.chunks + k] = need * self.chunks + k
                        self.sink[need * self.chunks + k] = letter * self.chunks + k
        for word in words:
            self._lay(word)
        # Each op comes after those that it waits for; in a deadlock, the last ones are missing.
        self.order = [
            (3 * stage + KINDS.index(kind)) * self.chunks + k
            for kind, stage, k in OpOrder(schedule_of(problem, words)).ops
        ]
        self.ends = [0.0] * (count + 1) + [-math.inf]
        self._play(0)
        self.span = self._span() if len(self.order) == count else math.inf

    def _lay(self, word: Word) -> None:
        seen = [0] * len(self.problem.device_of)
        op, alive = self.count, 0
        for letter in word:
            previous, op = op, letter * self.chunks + seen[letter]
            seen[letter] += 1
            self.before[op], self.after[previous] = previous, op
            alive += CHANGES[letter % 3]
            self.alive[op] = alive
        self.after[self.count] = self.count

    def _play(self, first: int) -> None:
        ends, before, source, time, copy = self.ends, self.before, self.source, self.time, self.copy
        for op in self.order[first:]:
            a, b = ends[before[op]], ends[source[op]] + copy
            ends[op] = (a if a > b else b) + time[op]

    def _span(self) -> float:
        span: float = max(map(sub, self._latest(), self.heads))
        if self.more:
            apart = min(self.chunks - 1, max(self.size, self.chunks // 2 // self.size * self.size))
            earlier = self.ends[self.chunks - 1 - apart : self.count : self.chunks]
            span += self.more * max(map(sub, self._latest(), earlier)) / apart
        return span

    def _latest(self) -> list[float]:
        return self.ends[self.chunks - 1 : self.count : self.chunks]

    def path(self, random: Callable[[], float]) -> list[int]:
        """The ops of a longest path for which the next op on their device waits."""
        ends, before, source, copy, count = self.ends, self.before, self.source, self.copy, self.count
        spans = [*map(sub, self._latest(), self.heads)]
        span = max(spans)
        latest = [letter for letter, each in enumerate(spans) if each == span]
        op = latest[int(random() * len(latest))] * self.chunks + self.chunks - 1
        ops = []
        while op < count:
            previous, other = before[op], source[op]
            a, b = ends[previous], ends[other] + copy
            if a > b or (a == b and random() < 0.5):
                op = previous
                if op < count:
                    ops.append(op)
            else:
                op = other
        return ops

    def swap(self, u: int) -> _Swap | None:
        """Swaps an op with the next one on its device, in each period; None if that isn't possible."""
        v, chunks = self.after[u], self.chunks
        low, high = sorted((u % chunks, v % chunks))
        shifts = range(-(low // self.size) * self.size, chunks - high, self.size)
        pairs = [(u + shift, v + shift) for shift in shifts if self.after[u + shift] == v + shift]
        if not all(self._may_swap(*pair) for pair in pairs):
            return None
        swap = _Swap(self.order, self.ends, self.span)
        self.order, first = list(self.order), len(self.order)
        for pair in pairs:
            swap.pairs.append(pair)
            self._link(*pair)
            place = self._sort(*pair)
            if place is None:
                self.undo(swap)
                return None
            first = min(first, place)
        self.ends = list(self.ends)
        self._play(first)
        self.span = self._span()
        swap.work = len(self.order) - first + len(self.order) // 8 + 16 * len(pairs)
        return swap

    def _may_swap(self, u: int, v: int) -> bool:
        a, b = u // self.chunks, v // self.chunks
        needed = a in self.problem.needs[b] and u % self.chunks == v % self.chunks
        if a == b or needed:
            return False
        return a % 3 != W or b % 3 != F or self.alive[v] < self.problem.caps[self.problem.device_of[a]]

    def _sort(self, u: int, v: int) -> int | None:
        """Puts v, and the ops in between that it waits for, before u in the order; None if u is one of these."""
        order, after, sink = self.order, self.after, self.sink
        first = order.index(u)
        last = order.index(v, first)
        needed, early, late = {v}, [v], []
        for op in reversed(order[first:last]):
            if after[op] in needed or sink[op] in needed:
                if op == u:
                    return None
                needed.add(op)
                early.append(op)
            else:
                late.append(op)
        order[first : last + 1] = early[::-1] + late[::-1]
        return first

    def undo(self, swap: _Swap) -> None:
        for u, v in reversed(swap.pairs):
            self._link(v, u)
        self.order, self.ends, self.span = swap.order, swap.ends, swap.span

    def words(self) -> list[Word]:
        words: list[Word] = [[] for _ in self.problem.caps]
        for op in self.order:
            letter = op // self.chunks
            words[self.problem.device_of[letter]].append(letter)
        return words

    def _link(self, u: int, v: int) -> None:
        """Puts v, which comes after u, before it."""
        a, b = self.before[u], self.after[v]
        if a < self.count:
            self.after[a] = v
        if b < self.count:
            self.before[b] = u
        self.before[v], self.after[v], self.before[u], self.after[u] = a, u, v, b
        self.alive[u], self.alive[v] = self.alive[v], self.alive[v] - CHANGES[u // self.chunks % 3]
