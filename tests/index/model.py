"""A reference model of the control plane: dicts and lists, one rule of the design per line.

It says what may be offered (invariant 4), what a begin cuts, what a commit publishes, and that nothing committed
disappears uncounted (invariant 7). Which victim eviction picks is free; how much it loses is not.
"""

from dataclasses import dataclass, field

ANY = 1 << 40


@dataclass(eq=False)
class Row:
    """One request row: `tags` are its context rows and history, what its keys and values depend on."""

    user: int
    tags: list
    hashed: bool
    history: int


@dataclass(eq=False)
class Entry:
    """What one user of one version may be offered, since it was last forgotten.

    `tags` is everything that was committed and is neither cut nor lost. Its end may be out of sight for a while: read
    out of the pages by an offload, evicted there, and not yet on the host. `shown` tokens are in sight.
    """

    tags: list = field(default_factory=list)
    shown: int = 0
    hash_tokens: int | None = None  # tokens covered by content hashes; None: committed without
    cut_pending: bool = False


@dataclass(eq=False)
class OpenRow:
    row: Row
    entry: Entry
    leads: bool
    cached: int
    stores: bool
    pages: list
    cut: int = ANY  # the lowest cut that was ordered while this row was open


@dataclass(eq=False)
class OpenBatch:
    rows: list
    version: int
    context: int
    refused: bool


def common_prefix(a, b):
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


class Model:
    def __init__(self, page_size):
        self.page_size = page_size
        self.entries = {}  # (user, version) -> Entry
        self.open = []
        self.retired = set()

    # ---- what may be found ----

    def entry(self, user, version):
        return self.entries.setdefault((user, version), Entry())

    def found(self, entry, row, context):
        """Tokens of `row` that match what is committed, and that the index can know to match."""
        tokens = common_prefix(entry.tags, row.tags)
        if row.hashed and tokens:
            if entry.hash_tokens is None:
                tokens = 0
            elif tokens % self.page_size and tokens != entry.hash_tokens:
                tokens -= tokens % self.page_size
        return tokens if tokens > context else 0

    # ---- operations: each changes what `committed` predicts ----

    def cut(self, entry, tokens):
        del entry.tags[tokens:]
        entry.shown = min(entry.shown, tokens)
        if entry.hash_tokens is not None and entry.hash_tokens > tokens:
            entry.hash_tokens = tokens - tokens % self.page_size
        for batch in self.open:
            for row in batch.rows:
                if row.entry is entry and row.stores:
                    row.cut = min(row.cut, tokens)

    def leaders(self, rows):
        """Per user the first of its longest rows: only that one may store, or cut."""
        lead = {}
        for i, row in enumerate(rows):
            if row.user not in lead or len(row.tags) > len(rows[lead[row.user]].tags):
                lead[row.user] = i
        return lead

    def begin(self, rows, version, context):
        """Applies the cuts a begin makes; returns the entries, row by row."""
        lead = self.leaders(rows)
        for user, i in lead.items():
            entry = self.entry(user, version)
            found = self.found(entry, rows[i], context)
            if found < len(entry.tags):
                self.cut(entry, found)
                entry.cut_pending = True
        return [self.entry(row.user, version) for row in rows]

    def commit(self, batch):
        """Publishes the rows that store; returns how many tokens that adds."""
        stored = 0
        for row in batch.rows:
            current = self.entries.get((row.row.user, batch.version))
            if not row.stores or current is not row.entry or batch.version in self.retired:
                continue
            row.entry.tags = list(row.row.tags)
            row.entry.shown = len(row.row.tags)
            row.entry.hash_tokens = len(row.row.tags) if row.row.hashed else None
            row.stores = False
            stored += len(row.row.tags) - row.cached
            if row.cut < ANY:
                self.cut(row.entry, row.cut)
        return stored

    def forget(self, users=None):
        for key in list(self.entries):
            if users is None or key[0] in users:
                del self.entries[key]

    def lose(self, entry, tokens):
        """Eviction or a failed copy left only this much."""
        for row in self.writers(entry):
            row.cut = min(row.cut, tokens)
        del entry.tags[tokens:]

    def writers(self, entry):
        return [row for batch in self.open for row in batch.rows if row.entry is entry and row.stores]

    def readers(self, entry):
        return [row for batch in self.open for row in batch.rows if row.entry is entry]
