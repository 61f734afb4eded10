"""Which requests take part in the next step, and how many tokens each computes.

First come, first served. A step is either a prefill step (chunks of prompts up to the token budget)
or a decode step (the newest token of every running request whose prompt is done, and its drafts);
while both have work they alternate, so that neither long prompts nor running requests starve the
other.

A request's `num_computed_tokens` moves on when its step is scheduled, not when its tokens are read:
so the next step can be scheduled in between.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from v4graph.engine.pages import PageManager
from v4graph.engine.prefix import Hit
from v4graph.engine.request import Request
from v4graph.plan.types import Mode, Plan


@dataclass(frozen=True)
class ScheduledBatch:
    """One step: its mode, its requests and their token counts."""

    mode: Mode
    requests: list[Request]
    num_scheduled_tokens: list[int]


class Scheduler:
    """Owns the waiting queue, the running list and the request-table slots."""

    def __init__(self, plan: Plan, pages: PageManager) -> None:
        self.plan, self.pages = plan, pages
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._slots = list(range(plan.limits.max_num_seqs, 0, -1))
        self._decode, self._width = plan.decode_mode, plan.speculation.verify_width
        self._last = self._decode
        largest = plan.mode(Mode.PREFILL).buckets[-1]
        self._prefill_tokens, self._prefill_reqs = largest.num_tokens, largest.num_reqs

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def schedule(self) -> ScheduledBatch | None:
        """The next step, with pages allocated; None when there is nothing to do."""
        if self._last is self._decode:
            batch = self._prefill_batch() or self._decode_batch()
        else:
            batch = self._decode_batch() or self._prefill_batch()
        if batch is not None:
            self._last = batch.mode
            self._launch(batch)
        return batch

    def _launch(self, batch: ScheduledBatch) -> None:
        """What the step is certain to compute; a verification at least its first token."""
        for request, count in zip(batch.requests, batch.num_scheduled_tokens, strict=True):
            request.num_unread_rounds += 1
            if batch.mode is Mode.TARGET_VERIFY:
                request.num_computed_tokens += 1
                request.num_unread_drafts += count - 1
            else:
                request.num_computed_tokens += count

    def finish(self, request: Request) -> None:
        """Drop a running or waiting request and free what it holds."""
        if request in self.running:
            self.running.remove(request)
            self._release(request)
        else:
            self.waiting.remove(request)

    def preempt(self, request: Request) -> None:
        """Take a running request's pages back; it is recomputed from its tokens later."""
        self.running.remove(request)
        self._release(request)
        request.num_computed_tokens = request.num_unread_drafts = 0
        request.num_published_units = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self.pages.free_all(request)
        self.pages.table.release(request.slot)
        self._slots.append(request.slot)
        request.slot = 0

    def _decode_batch(self) -> ScheduledBatch | None:
        batch: list[Request] = []
        for request in sorted(self.running, key=lambda r: r.arrival):
            if request.is_prefilling or request not in self.running:
                continue
            if self._make_room(request, self._width):
                batch.append(request)
        # A later request may have been preempted for an earlier one after it was chosen.
        batch = [r for r in batch if r in self.running]
        return ScheduledBatch(self._decode, batch, [self._width] * len(batch)) if batch else None

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Allocate for `num_tokens`, preempting the latest arrivals; False if it went itself.

        Before that, pages are freed that launched rounds have moved behind every later query's
        range, though their tokens are not read: a request alone must never lack its own pages.
        """
        freed = False
        while True:
            missing = self.pages.missing(request, num_tokens)
            if self.pages.can_allocate(missing):
                self.pages.allocate(request, missing)
                return True
            if not freed:
                freed = True
                for other in self.running:
                    self.pages.publish(other)
                    self.pages.free_unreadable(other)
                continue
            victim = max(self.running, key=lambda r: r.arrival)
            self.preempt(victim)
            if victim is request:
                return False

    def _prefill_batch(self) -> ScheduledBatch | None:
        budget = self._prefill_tokens
        batch: list[Request] = []
        counts: list[int] = []
        for request in sorted(self.running, key=lambda r: r.arrival):
            if len(batch) == self._prefill_reqs or budget == 0:
                break
            if request.is_prefilling and request in self.running:
                count = min(budget, request.num_prefill_tokens - request.num_computed_tokens)
                if self._make_room(request, count):
                    batch.append(request)
                    counts.append(count)
                    budget -= count
        while self.waiting and self._slots and budget and len(batch) < self._prefill_reqs:
            request = self.waiting[0]
            count = self._admit(request, budget)
            if not count:
                break
            batch.append(request)
            counts.append(count)
            budget -= count
        kept = [(r, n) for r, n in zip(batch, counts, strict=True) if r in self.running]
        if not kept:
            return None
        return ScheduledBatch(Mode.PREFILL, [r for r, _ in kept], [n for _, n in kept])

    def _admit(self, request: Request, budget: int) -> int:
        """Start a waiting request if its first chunk fits beside the running ones.

        Admission never preempts: a running request is worth more than a waiting one.

        Returns:
            Tokens of the chunk, at most `budget`; 0 if the request goes on waiting.
        """
        if request.num_unread_rounds:
            return 0  # preempted: tokens that it has to be recomputed with are on their way
        hit = self.pages.find_prefix(request)
        count, missing = self._first_chunk(request, hit, budget)
        if hit is not None and not count and not self.running:
            # The copies that a hit makes need more pages than computing its tokens again.
            hit = None
            count, missing = self._first_chunk(request, None, budget)
        if not count:
            return 0
        self.waiting.popleft()
        request.slot = self._slots.pop()
        if not request.num_preemptions:
            request.num_cached_tokens = request.num_computed_tokens
        p = request.params
        self.pages.table.admit(
            request.slot,
            request.token_ids,
            temperature=p.temperature,
            top_p=p.top_p,
            top_k=p.top_k,
            min_p=p.min_p,
            seed=request.seed,
            num_computed_tokens=request.num_computed_tokens,
            rules=request.rules,
        )
        self.running.append(request)
        self.pages.allocate(request, missing)
        self.pages.enter(request, hit)
        return count

    def _first_chunk(
        self, request: Request, hit: Hit | None, budget: int
    ) -> tuple[int, dict[str, list[int]]]:
        """Tokens and blocks of the chunk that a request starts with, the prefix pinned; 0 tokens
        and nothing pinned if the pages do not suffice."""
        if hit is not None:
            self.pages.pin(request, hit)
        count = min(budget, request.num_prefill_tokens - request.num_computed_tokens)
        missing = self.pages.missing(request, count)
        if self.pages.can_allocate(missing):
            return count, missing
        if hit is not None:
            self.pages.unpin(request, hit)
        return 0, {}
