"""How a trial of several workers fails or ends: one state machine for the local executor and Ray's actors."""

from __future__ import annotations

from typing import Generic, TypeVar, final

FAREWELL_S = 2.0
"""How long the others may take to fail, too, after one has failed."""

PARTING_S = 10.0
"""How long the others may take to end after the lead has ended well: what they still do is of use to nobody."""

_Word = TypeVar("_Word")


@final
class Crew(Generic[_Word]):
    """Which of a trial's workers still run, and why the trial fails. Pure: the caller tells the time.

    RUNNING -> FAILING, when one fails -> SETTLED, when all have ended, one has died, or the time is up.

    Who fails makes the others fail, as a rule: they lose the connection, or it has died. So a failure is not believed
    at once: if a death shows meanwhile, that was the cause. Who has not noticed when the time is up waits for a word
    that will never come, and is to be ended; so is who has not ended a while after the lead has ended well. The time
    counts from when all have begun, for a worker that is still starting can't notice.

    Args:
        size: How many workers; the one of rank 0 leads.
    """

    def __init__(self, size: int) -> None:
        self.running = set(range(size))
        self.died: int | None = None  # the first that did
        self._idle = set(range(size))  # who has not begun
        self._words: dict[int, _Word] = {}  # of those that failed, in order
        self._due_s = 0.0

    @property
    def failing(self) -> bool:
        """Whether one has failed or died."""
        return bool(self._words)

    @property
    def parting(self) -> bool:
        """Whether the lead has ended well: the trial is over, whoever still runs."""
        return 0 not in self.running and not self.failing

    def late_s(self, now_s: float) -> float | None:
        """How long until who still runs after the lead has ended well is to be ended; None: not now."""
        if not self.parting or not self.running or self.running & self._idle:
            return None
        return max(0.0, self._due_s - now_s)

    def parts_s(self, now_s: float) -> float | None:
        """The same where another may have failed before the lead ended well."""
        if not self.running:
            return None
        return self.wait_s(now_s) if self.failing else self.late_s(now_s)

    def begin(self, rank: int, now_s: float) -> None:
        """A worker has begun."""
        self._idle.discard(rank)
        self._due_s = now_s + (PARTING_S if self.parting else FAREWELL_S)

    def end(self, rank: int, now_s: float) -> None:
        """A worker has ended well."""
        self.running.discard(rank)
        if rank == 0 and not self.failing:
            self._due_s = now_s + PARTING_S

    def fail(self, rank: int, word: _Word, now_s: float) -> None:
        """A worker has failed, with its word on why."""
        self.running.discard(rank)
        if not self.failing:
            self._due_s = now_s + FAREWELL_S
        self._words.setdefault(rank, word)

    def die(self, rank: int, word: _Word) -> None:
        """A worker is no more; ``word``: how that came."""
        self.running.discard(rank)
        if self.died is None:
            self.died = rank
            self._words[rank] = word

    def wait_s(self, now_s: float) -> float | None:
        """How long until it is settled, unless something happens; None: for good, or until something does."""
        if self.died is not None:
            return 0.0
        if not self.failing:
            return None
        if not self.running:
            return 0.0
        return None if self.running & self._idle else max(0.0, self._due_s - now_s)

    def why(self) -> tuple[int, _Word]:
        """Whose word counts, and it: the first that died, or the lead, or the first that failed."""
        rank = self.died if self.died is not None else 0 if 0 in self._words else next(iter(self._words))
        return rank, self._words[rank]
