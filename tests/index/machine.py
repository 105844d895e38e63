"""A hypothesis state machine that runs the native index against the reference model and tagged storage.

Every rule plays one call of the index, or one step of a copy that somebody else carries out: copies are executed and
reported late, in any order, and may fail. After each step the invariants of the design are checked from what the index
shows.
"""

import random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mtserve_plugin import _core
from tests.index.model import Entry, Model, OpenBatch, OpenRow, Row
from tests.index.storage import POISON, TaggedStorage

USERS = [0, 1, 2, -3, 2**63 - 1]
NOBODY = 10**9  # asks for room and gives it back
EDITED = USERS[2:]  # histories of the others only grow or lose their end, as hashless requests promise
MAX_TOKENS = 40

GAUGES = {
    "entries", "open_batches", "pages_total", "pages_free", "pages_clean", "pages_dirty", "slots_total", "slots_free",
    "slots_largest_free", "pending_offload_tokens", "transfers_in_flight", "memory_bytes",
}  # fmt: skip

rows_strategy = st.lists(
    st.tuples(
        st.sampled_from(USERS),
        st.sampled_from(["grow", "same", "shorter", "edit", "slide", "context"]),
        st.integers(0, 13),
    ),
    min_size=1,
    max_size=4,
)
pick = st.integers(0, 63)


class Transfer:
    def __init__(self, task, kind, snapshot):
        self.task = task
        self.kind = kind
        self.snapshot = snapshot
        self.buffer = None  # what was gathered
        self.gathered = False  # ... and reported as such
        self.executed = False
        self.reported = False
        self.ok = True


class IndexMachine(RuleBasedStateMachine):
    roomy = False

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        num_pages=st.integers(1, 26),
        pages_per_slot=st.sampled_from([1, 2]),
        slots_per_chunk=st.sampled_from([1, 2, 4]),
        num_chunks=st.integers(0, 6),
        quota_chunks=st.sampled_from([1, 2, 3, 50]),
        tail=st.booleans(),
        max_open=st.sampled_from([2, 3, 20]),
        seed=st.integers(0, 2**32),
    )
    def build(
        self, page_size, num_pages, pages_per_slot, slots_per_chunk, num_chunks, quota_chunks, tail, max_open, seed
    ):
        config = _core.IndexConfig()
        config.page_size = page_size
        config.slot_tokens = page_size * pages_per_slot
        config.chunk_tokens = config.slot_tokens * slots_per_chunk
        config.num_pages = 2000 if self.roomy else num_pages
        config.num_chunks = 2000 if self.roomy else num_chunks
        config.offload_quota_tokens = config.chunk_tokens * quota_chunks
        config.tail_write_back = tail
        config.max_open_batches = 1000 if self.roomy else max_open
        self.config = config
        self.index = _core.Index(config)
        self.storage = TaggedStorage(
            page_size, config.num_pages, config.chunk_tokens, config.slot_tokens, config.num_chunks
        )
        self.model = Model(page_size)
        self.rng = random.Random(seed)
        self.transfers = []
        self.planned = {}  # OpenBatch -> native batch
        self.appended = set()
        self.histories = {user: [] for user in USERS}
        self.contexts = dict.fromkeys([*USERS, NOBODY], 7)
        self.key_of = {}  # tag -> (user, version)
        self.next_token = 1
        self.versions = [1, 2]
        self.next_version = 3
        self.stats = self.index.stats()
        self.start = dict(self.stats)

    # ---- histories ------------------------------------------------------------------------------------------

    def new_tokens(self, n):
        self.next_token += n
        return list(range(self.next_token - n, self.next_token))

    def move_history(self, user, move, n):
        """The user's next history; the content of a token below a cut comes back for users that are never edited."""
        history = self.histories[user]
        if user not in EDITED:
            if move == "grow":
                n = min(len(history) + n, MAX_TOKENS)
            elif move == "shorter":
                n = max(len(history) - n, 0)
            else:
                n = len(history)
            history = [(user, t) for t in range(n)]
        elif move == "grow":
            history = history + self.new_tokens(min(n, MAX_TOKENS - len(history)))
        elif move == "shorter":
            history = history[: max(len(history) - n, 0)]
        elif move == "edit" and history:
            at = n % len(history)
            history = [*history[:at], *self.new_tokens(1), *history[at + 1 :]]
        elif move == "slide":
            history = history[n:]
        if move == "context" and n % 3 == 0:
            self.contexts[user] += 1
        self.histories[user] = history
        return history

    def make_row(self, user, history, version, context):
        """A token's tag stands for everything its keys and values depend on."""
        key = self.contexts[user]
        tag = hash((user, version, context, key))
        tags = []
        for token in [(10**6, i) for i in range(context)] + history:
            tag = hash((tag, token))
            tags.append(tag)
            self.key_of[tag] = user, version
        return Row(user, tags, False, len(history)), key

    def hashes_of(self, histories):
        return [hash((7, token)) & (2**64 - 1) for history in histories for token in history]

    # ---- begin, commit, abort -------------------------------------------------------------------------------

    @rule(
        moves=rows_strategy,
        version=st.sampled_from([0, 0, 0, 1]),
        context=st.sampled_from([0, 0, 3]),
        hashed=st.booleans(),
        old_version=st.integers(0, 9),
    )
    def begin(self, moves, version, context, hashed, old_version):
        version = self.versions[version]
        if self.model.retired and old_version == 0:
            version = min(self.model.retired)
        histories = [self.move_history(*move) for move in moves]
        users = [move[0] for move in moves]
        hashed = hashed or any(user in EDITED for user in users)
        self.play_begin(users, histories, version, context, hashed)

    @rule(moves=rows_strategy, hashed=st.booleans(), context=st.sampled_from([0, 0, 0, 3]))
    def visit(self, moves, hashed, context):
        """A batch as most are: begun, served and committed before anything else happens."""
        self.begin(moves, 0, context, hashed, 1)
        self.commit(len(self.model.open) - 1, True)

    @rule(users=st.lists(st.sampled_from(USERS), min_size=1, max_size=3), n=st.integers(1, 13))
    def grow(self, users, n):
        self.visit([(user, "grow", n) for user in users], True, 0)

    @precondition(lambda self: not self.roomy)
    @rule(share=st.floats(0, 1))
    def squeeze(self, share):
        """Somebody takes a share of all pages and gives it back: what lay there is only on the host, or lost."""
        tokens = int(share * self.config.num_pages) * self.config.page_size
        self.play_begin([NOBODY], [[(NOBODY, t) for t in range(tokens)]], self.versions[0], 0, False)
        self.abort(len(self.model.open) - 1, 0)

    def play_begin(self, users, histories, version, context, hashed):
        made = [self.make_row(u, h, version, context) for u, h in zip(users, histories, strict=True)]
        rows = [row for row, _ in made]
        keys = [key for _, key in made]
        token_hashes = self.hashes_of(histories) if hashed else []
        # No history token at all: nothing is hashed, and nothing needs to be.
        for row in rows:
            row.hashed = bool(token_hashes)
        device_before = {u: self.index.lengths(u, version)[1] for u in users}
        transfers_before = self.stats["transfers_in_flight"]
        refused = self.stats["open_batches"] >= self.config.max_open_batches

        native = self.index.begin(
            users, [len(h) for h in histories], context, version, token_hashes, [key & (2**64 - 1) for key in keys]
        )
        assert native.is_open

        lead = self.model.leaders(rows)
        had_writer = {u: bool(self.model.writers(self.model.entries.get((u, version), Entry()))) for u in users}
        had_cut = {u: self.model.entries.get((u, version), Entry()).cut_pending for u in users}
        entries = [Entry() for _ in rows] if refused else self.model.begin(rows, version, context)
        batch = OpenBatch([], version, context, refused)
        for i, (row, entry, (cached, stores, pages)) in enumerate(zip(rows, entries, native.rows, strict=True)):
            leads = lead[row.user] == i and not refused
            batch.rows.append(OpenRow(row, entry, leads, cached, stores, pages))
            found = min(self.model.found(entry, row, context), entry.shown)
            assert cached <= found, "offered what was never committed under this identity"
            assert cached == 0 or cached > context
            in_pages = min(found, device_before[row.user])
            if not refused and in_pages > context:
                assert cached >= in_pages, "pages that match were not offered"
            assert len(pages) == -(-(len(row.tags) if stores else cached) // self.config.page_size)
            if stores:
                assert leads, "a duplicate row stores"
                assert cached == max(self.index.lengths(row.user, version)[0], 0), "stores behind a gap"
                assert cached < len(row.tags)
                assert not had_writer[row.user], "two writers"
                assert version not in self.model.retired
            if self.roomy and not refused:
                assert cached == found
                free = not had_writer[row.user] and not had_cut[row.user]
                cut_now = entry.cut_pending and not had_cut[row.user]
                busy = bool(self.model.readers(entry)) or transfers_before > 0
                wants = leads and len(row.tags) > cached and version not in self.model.retired
                if wants and free and not (cut_now and busy):
                    assert stores, "an idle user was not stored although there was room"
        self.model.open.append(batch)
        self.planned[batch] = native
        for task in native.onloads:
            self.transfers.append(Transfer(task, "onload", None))

        self.observe()
        hits = sum(max(row.cached - context, 0) for row in batch.rows)
        assert self.rise("device_hit_tokens") + self.rise("host_hit_tokens") == hits
        assert self.rise("history_tokens") == sum(row.history for row in rows)
        assert self.rise("requests") == len(rows)
        assert self.rise("refused_batches") == refused
        return batch

    def loads(self, batch):
        tickets = set(self.planned[batch].loads)
        return [t for t in self.transfers if t.kind == "onload" and t.task.ticket in tickets]

    def arrived(self, batch):
        return all(t.executed and t.ok for t in self.loads(batch))

    def failed(self, batch):
        return any(t.executed and not t.ok for t in self.loads(batch))

    def append(self, batch, part=1.0):
        for row in batch.rows:
            if row.stores and batch not in self.appended:
                tags = row.row.tags[row.cached :]
                self.storage.write(row.pages, row.cached, tags[: int(len(tags) * part)])

    @precondition(lambda self: self.model.open)
    @rule(which=pick)
    def append_early(self, which):
        batch = self.model.open[which % len(self.model.open)]
        if batch not in self.appended and not self.failed(batch):
            self.append(batch)
            self.appended.add(batch)

    @precondition(lambda self: self.model.open)
    @rule(which=pick, waits=st.sampled_from([True, True, True, False]))
    def commit(self, which, waits):
        batch = self.model.open[which % len(self.model.open)]
        if waits:
            for transfer in self.loads(batch):
                self.execute(transfer, ok=True)
        if self.failed(batch):
            return self.abort(which, 0)
        self.read(batch)
        self.append(batch)
        self.appended.add(batch)
        self.model.open.remove(batch)
        stored = self.model.commit(batch)
        self.plan(self.index.commit(self.planned.pop(batch)), "offload")
        self.observe()
        assert self.rise("stored_tokens") == stored
        assert self.rise("commits") == 1

    @precondition(lambda self: self.model.open)
    @rule(which=pick, part=st.floats(0, 1))
    def abort(self, which, part):
        batch = self.model.open[which % len(self.model.open)]
        if not self.failed(batch):
            self.append(batch, part)
        self.model.open.remove(batch)
        self.index.abort(self.planned.pop(batch))
        self.observe()
        assert self.rise("lost_tokens") == 0
        assert self.rise("stored_tokens") == 0

    # ---- transfers ------------------------------------------------------------------------------------------

    def plan(self, tasks, kind):
        for task in tasks:
            assert task.first < task.end
            tags = self.storage.task_pages(task) if kind == "offload" else None
            transfer = Transfer(task, kind, tags)
            if kind == "offload":
                transfer.entry = self.model.entries.get(self.key_of.get(tags[0]))
            self.transfers.append(transfer)

    def execute(self, transfer, ok):
        if transfer.executed:
            return
        transfer.executed = True
        transfer.ok = ok
        if transfer.kind == "offload":
            self.gather(transfer)
            self.storage.offload(transfer.task, transfer.buffer if ok else self.spoiled(transfer.buffer))
        else:
            self.storage.onload(transfer.task)
            if not ok:
                for page, row, _ in self.storage.task_rows(transfer.task):
                    self.storage.device[page][row] = self.spoiled([self.storage.device[page][row]])[0]

    def spoiled(self, tags):
        """What a copy that fails half-way may leave."""
        return [self.rng.choice([POISON, tag]) for tag in tags]

    def gather(self, transfer):
        if transfer.buffer is None:
            transfer.buffer = self.storage.task_pages(transfer.task)
            assert transfer.buffer == transfer.snapshot, "pages changed under an offload"
            assert POISON not in transfer.buffer

    @precondition(lambda self: any(t.kind == "offload" and not t.executed for t in self.waiting()))
    @rule(which=pick)
    def gather_early(self, which):
        """The pages of an offload are read into a buffer, and are evictable from then on."""
        waiting = [t for t in self.waiting() if t.kind == "offload" and not t.executed and not t.gathered]
        if waiting:
            transfer = waiting[which % len(waiting)]
            self.gather(transfer)
            transfer.gathered = True
            self.index.offload_gathered(transfer.task)
            self.observe()
            assert self.rise("lost_tokens") == 0

    def report(self, transfer):
        transfer.reported = True
        done = self.index.onload_done if transfer.kind == "onload" else self.index.offload_done
        next_tasks = done(transfer.task, transfer.ok)
        self.plan(next_tasks, "offload")
        self.observe()
        if transfer.kind == "onload":
            assert self.rise("onload_failures") == (not transfer.ok)
            # What was committed meanwhile is offloaded now, for which others may lose their place on the host.
            assert not transfer.ok or self.rise("lost_tokens") <= self.rise("host_evicted_tokens")
        else:
            assert self.rise("offload_failures") == (not transfer.ok)

    def waiting(self):
        return [t for t in self.transfers if not t.reported]

    @precondition(lambda self: self.waiting())
    @rule(which=pick, ok=st.sampled_from([True, True, True, False]))
    def carry_out(self, which, ok):
        waiting = self.waiting()
        self.execute(waiting[which % len(waiting)], ok or self.roomy)

    @precondition(lambda self: self.waiting())
    @rule(which=pick, ok=st.sampled_from([True, True, True, True, False]))
    def finish_transfer(self, which, ok):
        waiting = self.waiting()
        transfer = waiting[which % len(waiting)]
        self.execute(transfer, ok or self.roomy)
        self.report(transfer)

    @precondition(lambda self: self.waiting())
    @rule()
    def drain(self):
        while self.waiting():
            transfer = self.rng.choice(self.waiting())
            self.execute(transfer, True)
            self.report(transfer)

    @rule(users=st.lists(st.sampled_from(USERS), max_size=3), version=st.sampled_from([0, 1]))
    def prefetch(self, users, version):
        tasks = self.index.prefetch(users, self.versions[version])
        self.plan(tasks, "onload")
        self.observe()
        assert self.rise("onloads") == len(tasks)

    @rule(flush_all=st.booleans())
    def flush(self, flush_all):
        while True:
            tasks = self.index.plan_flush()
            self.plan(tasks, "offload")
            self.observe()
            if not flush_all or not tasks:
                break
            self.drain()

    # ---- operators' calls -----------------------------------------------------------------------------------

    @rule(users=st.lists(st.sampled_from(USERS), max_size=1))
    def evict(self, users):
        self.index.evict(users)
        self.model.forget(users)
        self.observe()
        assert self.rise("lost_tokens") == 0

    @rule(really=st.integers(0, 3))
    def clear(self, really):
        if really == 0:
            self.index.clear()
            self.model.forget()
            self.observe()
            assert self.stats["entries"] == 0

    @rule(really=st.integers(0, 3), which=st.integers(0, 1))
    def retire_version(self, really, which):
        if really == 0:
            self.index.retire_version(self.versions[which])
            self.model.retired.add(self.versions[which])
            self.versions[which] = self.next_version
            self.next_version += 1
            self.observe()

    # ---- what must hold after each step ---------------------------------------------------------------------

    def rise(self, counter):
        return self.stats[counter] - self.last_stats[counter]

    def observe(self):
        """Compares what is left with what the model predicts; the model takes over what was lost and counted."""
        self.last_stats, self.stats = self.stats, self.index.stats()
        in_transit = {}
        for transfer in self.waiting():
            if transfer.kind == "offload" and transfer.gathered:
                in_transit[self.key_of[transfer.snapshot[0]]] = transfer
        lost = 0
        for (user, version), entry in self.model.entries.items():
            shown = max(self.index.lengths(user, version)[0], 0)
            before = len(entry.tags)
            assert shown <= before, f"user {user}: {shown} tokens offered, {before} were committed"
            transfer = in_transit.get((user, version))
            left = shown
            if transfer is not None and transfer.entry is entry:
                left = max(shown, min(transfer.task.end, before))
            if shown < entry.shown and self.rise("onload_failures"):
                left = shown  # what is on its way behind a gap goes too
            if left < before:
                if version not in self.model.retired:
                    lost += before - left
                    if self.rise("onload_failures") == 0 and self.rise("offload_failures") == 0:
                        assert not self.model.readers(entry), "a user in use lost tokens"
                self.model.lose(entry, left)
            entry.shown = shown
        assert lost == self.rise("lost_tokens"), "tokens vanished uncounted, or were counted twice"
        if self.roomy:
            assert lost == 0
        if self.stats["transfers_in_flight"] == 0:
            for entry in self.model.entries.values():
                if not self.model.readers(entry):
                    entry.cut_pending = False

    def read(self, batch):
        """Every row reads exactly what was written for it."""
        for row in batch.rows:
            if self.arrived(batch):
                assert self.storage.read(row.pages, 0, row.cached) == row.row.tags[: row.cached], (
                    "a row reads wrong tokens"
                )
            if batch in self.appended and row.stores:
                tags = self.storage.read(row.pages, row.cached, len(row.row.tags))
                assert tags == row.row.tags[row.cached :], "appended tokens were overwritten"

    @invariant()
    def everything_holds(self):
        if hasattr(self, "index"):
            self.index_is_consistent()
            self.both_tiers_hold_prefixes()
            self.nobody_shares_a_page()

    def index_is_consistent(self):
        assert self.index.check() == ""
        now = self.index.stats()
        for name, value in now.items():
            if name not in GAUGES:
                assert value >= self.start[name], f"{name} fell"
            assert value >= 0
        self.start = now
        assert now["device_hit_tokens"] + now["host_hit_tokens"] <= now["history_tokens"]
        assert now["pending_offload_tokens"] <= self.config.offload_quota_tokens
        assert now["transfers_in_flight"] == len(self.waiting())
        assert now["open_batches"] == sum(not batch.refused for batch in self.model.open)
        assert now["pages_free"] + now["pages_clean"] + now["pages_dirty"] <= now["pages_total"]
        for batch in self.model.open:
            self.read(batch)

    def both_tiers_hold_prefixes(self):
        quiet = not self.waiting() and not self.model.open
        pages = host_tokens = 0
        for version in [*self.versions, *self.model.retired]:
            for user in USERS:
                committed, device, host = self.index.lengths(user, version)
                assert (committed, device, host) == (-1, -1, -1) or min(committed, device, host) >= 0
                assert committed <= max(device, host)
                if quiet:
                    assert committed == max(device, host)
                    pages += -(-max(device, 0) // self.config.page_size)
                    host_tokens += max(host, 0)
        if quiet:
            stats = self.index.stats()
            assert pages == stats["pages_total"] - stats["pages_free"], "pages leaked"
            used = stats["slots_total"] - stats["slots_free"]
            assert host_tokens <= used * self.config.slot_tokens
            assert (host_tokens == 0) == (used == 0), "slots leaked"

    def nobody_shares_a_page(self):
        """Between open batches and copies in flight, a page or slot belongs to one user's one lifetime."""
        owner, entry_of, slots = {}, {}, {}
        for batch in self.model.open:
            for row in batch.rows:
                assert len(set(row.pages)) == len(row.pages)
                for page in row.pages:
                    assert owner.setdefault(page, row.entry) is row.entry, f"page {page} is in two users' rows"
        for transfer in self.waiting():
            task = transfer.task
            for page in [] if transfer.gathered else task.pages:
                known = entry_of.setdefault(task.entry, owner.get(page))
                assert owner.get(page, known) is known, f"page {page} of a copy is in another user's row"
            for slot, order in task.blocks:
                for s in range(slot, slot + (1 << order)):
                    assert slots.setdefault(s, task.entry) == task.entry, f"slot {s} is in two copies"
        for version in self.model.open:
            stores = [id(row.entry) for row in version.rows if row.stores]
            assert len(stores) == len(set(stores))

    def teardown(self):
        if not hasattr(self, "index"):
            return
        while self.model.open:
            (self.commit if self.rng.random() < 0.5 else self.abort)(0, 1)
        self.drain() if self.waiting() else None
        self.index_is_consistent()
        self.both_tiers_hold_prefixes()
        # Whatever is left must be readable.
        for version in self.versions:
            for user in USERS:
                batch = self.play_begin([user], [self.histories[user]], version, 0, user in EDITED)
                for transfer in self.loads(batch):
                    self.execute(transfer, True)
                self.read(batch)
                self.abort(0, 0)
                while self.waiting():
                    self.report(self.waiting()[0])
        self.index.evict(USERS[:2])
        self.index.clear()
        stats = self.index.stats()
        assert self.index.check() == ""
        # Retired entries left the map with clear() too: everything is free again, in whole chunks.
        assert stats["entries"] == stats["pending_offload_tokens"] == stats["transfers_in_flight"] == 0
        assert stats["pages_free"] == stats["pages_total"]
        assert stats["slots_free"] == stats["slots_total"]
        whole = self.config.chunk_tokens // self.config.slot_tokens
        assert stats["slots_largest_free"] == (whole if self.config.num_chunks else 0)
