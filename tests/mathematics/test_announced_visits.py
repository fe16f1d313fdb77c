"""The barriers by which dQ of announced visits goes to memory (sm90/backward/dq_outlet.cuh, dq_adders.cuh).

A model of the four warps that compute dQ, of the two adders and of the copy engine, each step at a random time: nobody
reads what is not there, overwrites what is still read, or waits for ever, and each piece is added once.
"""

import random

import pytest

WARPS, ADDERS = 4, 2
END = -1


class Barrier:
    """An mbarrier: a phase completes with its last arrival; waits know phases by their parity alone."""

    def __init__(self, arrivals: int):
        self.arrivals = self.pending = arrivals
        self.phase = 0

    def arrive(self):
        self.pending -= 1
        if self.pending == 0:
            self.pending = self.arrivals
            self.phase += 1

    def has_completed(self, parity: int) -> bool:
        return (self.phase - 1) % 2 == parity


class Position:
    """tile::RingPosition."""

    def __init__(self, stages: int, steps: int = 0):
        self.stages, self.stage, self.parity = stages, 0, 0
        self.advance(steps)

    def advance(self, steps: int = 1):
        for _ in range(steps):
            self.stage = (self.stage + 1) % self.stages
            self.parity ^= self.stage == 0


class Block:
    def __init__(self, pieces: int, stages: int, last_visits: list[bool], rng: random.Random):
        self.pieces, self.stages, self.last_visits, self.rng = pieces, stages, last_visits, rng
        self.full = [Barrier(WARPS) for _ in range(stages)]
        self.empty = [Barrier(1) for _ in range(stages)]
        self.announced = [Barrier(WARPS) for _ in range(ADDERS)]
        self.fetched = Barrier(1)
        self.meetings = Barrier(WARPS)
        self.pending = [None] * ADDERS
        self.held = [[None] * WARPS for _ in range(stages)]  # a warp's share of each stage
        self.is_read = [False] * stages  # by the copy engine
        self.added = []

    def idle(self):
        for _ in range(self.rng.randrange(5)):
            yield

    def wait(self, barrier: Barrier, parity: int):
        while not barrier.has_completed(parity):
            yield

    def fill(self, stage: int, warp: int, value):
        assert not self.is_read[stage]
        self.held[stage][warp] = value

    def announce(self, warp: int, adder: int, visit: int):
        if warp == 0:
            self.pending[adder] = visit
        yield
        self.announced[adder].arrive()

    def fetch(self, visit: int, at: Position):
        for piece in range(self.pieces):
            to = Position(self.stages, at.stage + piece)
            parity = at.parity ^ (at.stage + piece >= self.stages)
            yield from self.wait(self.empty[to.stage], parity ^ 1)
            yield from self.idle()
            for warp in range(WARPS):
                self.fill(to.stage, warp, ("sums", visit, piece))
        self.fetched.arrive()

    def warp(self, number: int):
        at, adder, fetched_parity, meetings = Position(self.stages), 0, 0, 0
        for visit, is_last in enumerate(self.last_visits):
            if is_last:
                self.meetings.arrive()
                yield from self.wait(self.meetings, meetings)
                meetings ^= 1
                if number == 0:
                    yield from self.fetch(visit, at)
            for piece in range(self.pieces):
                if not is_last:
                    yield from self.wait(self.empty[at.stage], at.parity ^ 1)
                    if piece == 0:
                        yield from self.announce(number, adder, visit)
                        adder ^= 1
                yield from self.idle()
                if is_last:
                    yield from self.wait(self.fetched, fetched_parity)
                    assert self.held[(at.stage + piece) % self.stages][number] == ("sums", visit, piece)
                else:
                    self.fill(at.stage, number, ("dq", visit, piece))
                    yield
                    self.full[at.stage].arrive()
                    at.advance()
            fetched_parity ^= is_last
        for _ in range(self.stages):
            yield from self.wait(self.empty[at.stage], at.parity ^ 1)
            at.advance()
        for adder_told in (adder, adder ^ 1):
            yield from self.announce(number, adder_told, END)

    def adder(self, number: int):
        at, parity = Position(self.stages, number * self.pieces), 0
        while True:
            yield from self.wait(self.announced[number], parity)
            visit = self.pending[number]
            if visit == END:
                return
            yield from self.idle()  # the turn
            for piece in range(self.pieces):
                yield from self.wait(self.full[at.stage], at.parity)
                self.is_read[at.stage] = True
                yield from self.idle()
                assert self.held[at.stage] == [("dq", visit, piece)] * WARPS
                self.is_read[at.stage] = False
                self.added.append((visit, piece))
                self.empty[at.stage].arrive()
                at.advance()
            yield from self.idle()  # until it is written
            at.advance(self.pieces)
            parity ^= 1

    def run(self):
        threads = [self.warp(i) for i in range(WARPS)] + [self.adder(i) for i in range(ADDERS)]
        speeds = [self.rng.random() ** 3 + 0.01 for _ in threads]
        for _ in range(200_000):
            if not threads:
                return
            i = self.rng.choices(range(len(threads)), speeds)[0]
            if next(threads[i], "ends") == "ends":
                del threads[i], speeds[i]
        raise AssertionError("somebody waits for ever")


@pytest.mark.parametrize(("pieces", "stages"), [(1, 2), (2, 2), (2, 3), (2, 4)])
def test_every_piece_is_added_once(pieces, stages):
    for seed in range(60):
        rng = random.Random(seed)
        share = rng.choice([0, 0.1, 0.3, 0.6, 1])
        last_visits = [rng.random() < share for _ in range(rng.randrange(20))]
        block = Block(pieces, stages, last_visits, rng)
        block.run()
        others = [visit for visit, is_last in enumerate(last_visits) if not is_last]
        assert sorted(block.added) == [(visit, piece) for visit in others for piece in range(pieces)]
