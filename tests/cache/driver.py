"""Traffic for a cache of any kind, every answer of which is checked.

Keys and values are a function of (version, context, user, content up to the token, layer): what a causal model makes of
them. A stale, foreign or torn page therefore shows as a wrong byte, and as a wrong score.
"""

import contextlib
import threading
import zlib

import numpy as np
import torch

from mtserve_plugin import CacheConfig, NoCache
from mtserve_plugin.errors import OnloadError

_MIX = np.uint64(0x9E3779B97F4A7C15)


def tiny_config(**options):
    sizes = {
        "num_layers": 2,
        "num_heads": 2,
        "qk_dim": 4,
        "v_dim": 6,
        "dtype": "float32",
        "attn_norm_len": 50,
        "page_size": 4,
        "num_pages": 40,
        "chunk_size": 16,
        "offload_quota_tokens": 64,
    }
    chunks = options.pop("chunks", 0)
    config = CacheConfig(**(sizes | options))
    return config.replace(host_bytes=chunks * config.chunk_bytes)


def mix(x):
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def digests(seed, tokens):
    """Per token a number that stands for it and everything before it."""
    out = np.empty(len(tokens), dtype=np.uint64)
    at = seed & (2**64 - 1)
    for i, token in enumerate(tokens):
        at = (at * 0x2545F4914F6CDD1D + token * 0x632BE59BD9B4E019 + 0x9E3779B97F4A7C15) & (2**64 - 1)
        at ^= at >> 29
        out[i] = at
    return out


def values(config, tokens, layer, name):
    """`[len(tokens), heads, dim]` in [-1, 1), exact in the cache's dtype."""
    dim = config.v_dim if name == "v" else config.qk_dim
    salt = np.uint64((layer * 3 + "qkv".index(name) + 1) * 1_000_003)
    lane = np.arange(config.num_heads * dim, dtype=np.uint64)
    bits = mix((tokens + salt)[:, None] + lane[None, :] * _MIX)
    # 8 bits: exact in every dtype.
    x = (bits >> np.uint64(56)).astype(np.float64) / 128 - 1
    return torch.from_numpy(x).reshape(len(tokens), config.num_heads, dim)


class Request:
    """One row: `history` holds token contents; what precedes it and whom it belongs to is in `seed`."""

    def __init__(self, user, history, candidates, context=0, context_key=0, version=""):
        self.user = user
        self.history = list(history)
        self.num_candidates = candidates
        self.context_key = context_key
        seed = zlib.crc32(repr((user, context_key, context, version)).encode())
        self.tokens = digests(seed, [*range(-context, 0), *self.history])
        self.candidates = digests(seed + 7 * len(history), range(candidates))


def expected_rows(config, request, first, layer):
    """Float64 attention for the rows from position `first` on, then the candidates, straight from the definition."""
    keys = values(config, request.tokens, layer, "k")
    vals = values(config, request.tokens, layer, "v")
    total = len(request.tokens)
    new = np.concatenate([request.tokens[first:], request.candidates])
    q, k, v = (values(config, new, layer, name) for name in "qkv")
    position = torch.cat([torch.arange(first, total), torch.full((len(request.candidates),), total)])
    distance = position[:, None] - torch.arange(total)[None, :]
    is_candidate = position == total
    visible = torch.where(is_candidate[:, None], distance > 0, distance >= 0)
    if config.max_attn_len:
        visible &= distance <= config.max_attn_len
    weights = torch.nn.functional.silu(torch.einsum("qhd,khd->hqk", q, keys) * config.scale) / config.attn_norm_len
    out = torch.einsum("hqk,khd->qhd", weights * visible, vals)
    itself = torch.nn.functional.silu((q * k).sum(-1) * config.scale) / config.attn_norm_len
    return out + (itself * is_candidate[:, None])[:, :, None] * v


def read_pages(cache, table, row, tokens, layer):
    """Keys and values `[tokens, heads, dim]` of a batch row, as they lie in the device table."""
    config = cache.config
    first, last = int(table.indptr[row]), int(table.indptr[row + 1])
    pages = cache.table[layer, table.indices[first:last].long()]
    split = config.page_size * config.k_row
    k = pages[:, :split].reshape(-1, config.num_heads, config.qk_dim)[:tokens]
    v = pages[:, split:].reshape(-1, config.num_heads, config.v_dim)[:tokens]
    return k, v


class Stop(Exception):
    """Raised inside a batch to abort it."""


def token_hashes(requests):
    """Any fixed function of the content will do."""
    flat = np.array([token for request in requests for token in request.history], dtype=np.int64)
    return torch.from_numpy(mix(flat.view(np.uint64) + np.uint64(1)).view(np.int64))


def begin(cache, requests, *, hashed=False, context=0, version=""):
    return cache.batch(
        torch.tensor([r.user for r in requests], dtype=torch.int64),
        torch.tensor([len(r.history) for r in requests], dtype=torch.int64),
        num_candidates=torch.tensor([r.num_candidates for r in requests], dtype=torch.int64),
        context_tokens=context,
        token_hashes=token_hashes(requests) if hashed else None,
        context_keys=torch.tensor([r.context_key for r in requests]) if context else None,
        version=version,
    )


def dense(config, batch, requests, layer, name):
    context = batch.layout.context.tolist()
    rows = [values(config, np.empty(0, dtype=np.uint64), layer, name)]
    for request, cached, extra in zip(requests, batch.cached_lengths.tolist(), context, strict=True):
        first = len(request.tokens) - len(request.history) - extra + cached
        rows.append(values(config, np.concatenate([request.tokens[first:], request.candidates]), layer, name))
    return torch.cat(rows).to(config.torch_dtype)


def serve(cache, requests, *, stop_at=None, check_bytes=True, **identity):
    """Serves one batch and checks all of its bytes and scores; `stop_at` is the layer where it raises Stop.

    Returns the batch, committed. Raises OnloadError as a model would.
    """
    config = cache.config
    tolerance = 1e-5 if config.dtype == "float32" else 0.02
    with begin(cache, requests, **identity) as batch:
        cached = batch.cached_lengths.tolist()
        offsets = batch.offsets.tolist()
        for layer in range(config.num_layers):
            if stop_at == layer:
                raise Stop
            table = batch.wait(layer)
            if check_bytes and not isinstance(cache, NoCache):
                for row, request in enumerate(requests):
                    paged = int(batch.layout.paged[row])
                    got = read_pages(cache, table, row, paged, layer)
                    for x, name in zip(got, "kv", strict=True):
                        want = values(config, request.tokens[:paged], layer, name).to(x.dtype)
                        assert torch.equal(x, want), (
                            f"row {row}: cached {name} of layer {layer} is not what was written"
                        )
            q, k, v = (dense(config, batch, requests, layer, name) for name in "qkv")
            assert len(q) == batch.num_rows
            out = batch.attend(layer, q, k, v)
            for row, request in enumerate(requests):
                n_context = len(request.tokens) - len(request.history)
                first = cached[row] + n_context if cached[row] else 0
                want = expected_rows(config, request, first, layer)
                torch.testing.assert_close(
                    out[offsets[row] : offsets[row + 1]].double(), want, atol=tolerance, rtol=tolerance
                )
    return batch


def history_of(user, length):
    """The history of a user whose events never change."""
    return [abs(user) % 10_000 * 1000 + t for t in range(length)]


def visit(cache, *rows, candidates=2, **identity):
    """Serves one batch of (user, history length) rows, checked; returns the cached length of each."""
    requests = [Request(user, history_of(user, n), candidates, version=identity.get("version", "")) for user, n in rows]
    return serve(cache, requests, **identity).cached_lengths.tolist()


def push_out(cache, pages=None):
    """Makes room for `pages` pages (all by default): what lies there is evicted from the device."""
    wanted = cache.config.num_pages if pages is None else pages
    batch = cache.begin([-999], [wanted * cache.config.page_size], num_candidates=0)
    cache.abort(batch)


class Users:
    """Histories that grow, lose their end, are edited or slide; shared by threads."""

    def __init__(self, faithful, edited, longest):
        self.faithful = faithful
        self.edited = edited
        self.longest = longest
        self.history = {user: [] for user in [*faithful, *edited]}
        self.context_key = dict.fromkeys(self.history, 1)
        self.next_token = 1
        self.lock = threading.Lock()

    def new_tokens(self, n):
        self.next_token += n
        return list(range(self.next_token - n, self.next_token))

    def visit(self, user, rng):
        with self.lock:
            history = self.history[user]
            n = rng.choice([0, 1, 2, 3, 4, 5, 8, 16, 17])
            move = rng.choices(["grow", "shorter", "edit", "slide", "context"], [70, 6, 4, 2, 2])[0]
            room = self.longest - len(history)
            if user in self.faithful:
                # Without hashes a token's content must never change, so a position always holds the same token.
                length = len(history) - min(n, len(history)) if move == "shorter" else len(history) + min(n, room)
                history = [user * 1000 + t for t in range(length)]
            elif move == "shorter":
                history = history[: max(len(history) - n, 0)]
            elif move == "edit" and history:
                at = rng.randrange(len(history))
                history = [*history[:at], *self.new_tokens(1), *history[at + 1 :]]
            elif move == "slide":
                history = history[n:]
            else:
                history = history + self.new_tokens(min(n, room))
            if move == "context":
                self.context_key[user] += 1
            self.history[user] = history
            return history, self.context_key[user]


def traffic(cache, users, rng, steps, *, context=0, versions=("",), faults=False, lonely=True):
    """A random stream of batches and operators' calls; `lonely` when no other thread uses the cache."""
    reference = NoCache(cache.config)
    served = failed = 0
    everybody = [*users.faithful, *users.edited]
    for step in range(steps):
        version = rng.choice(versions)
        chosen = [rng.choice(everybody) for _ in range(rng.randint(1, 4))]
        requests = []
        for user in chosen:
            history, key = users.visit(user, rng)
            requests.append(Request(user, history, rng.randint(0, 3), context, key if context else 0, version))
        hashed = any(user in users.edited for user in chosen)
        identity = {"hashed": hashed, "context": context, "version": version}
        stop_at = rng.randrange(cache.config.num_layers) if rng.random() < 0.06 else None
        if faults and rng.random() < 0.1:
            kind = rng.choice(["onload_copy", "offload_copy"])
            cache._engine.inject_faults(**{kind: rng.randint(1, 3)})
        try:
            with contextlib.suppress(Stop):
                serve(cache, requests, stop_at=stop_at, **identity)
                served += 1
        except OnloadError:
            assert faults
            failed += 1
            serve(reference, requests, **identity)
        dice = rng.random()
        if dice < 0.03:
            cache.evict([rng.choice(everybody)])
        elif dice < 0.08:
            cache.prefetch([rng.choice(everybody) for _ in range(2)], version=version)
        elif dice < 0.09:
            cache.flush()
        elif dice < 0.095:
            cache.clear()
        if step % 20 == 0:
            cache.check()
    return served, failed
