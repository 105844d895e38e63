"""The ranker's arithmetic written out once more, in float64, one user and one whole mask at a time."""

import math
import random

import torch

from mtserve_plugin.models import HSTURankerConfig, build_features


class Events:
    """A few users with histories that only grow, as plain lists."""

    def __init__(self, seed, config: HSTURankerConfig):
        self.random = random.Random(seed)
        self.config = config
        self.item, self.action, self.time = {}, {}, {}

    def grow(self, user, count):
        """Appends events to a user's history and returns its new length."""
        items, actions, times = (column.setdefault(user, []) for column in (self.item, self.action, self.time))
        for _ in range(count):
            items.append(self.random.randrange(self.config.num_items))
            actions.append(self.random.randrange(self.config.num_actions))
            # Bursts of seconds and pauses of weeks.
            gap = int(math.exp(self.random.uniform(0, 14)))
            times.append((times[-1] if times else 1_600_000_000) + gap)
        return len(items)

    def row(self, user, length=None, candidates=20):
        """A request as a dict; `length` cuts the history to its first tokens."""
        history = {name: getattr(self, name).get(user, [])[:length] for name in ("item", "action", "time")}
        last = history["time"][-1] if history["time"] else 1_600_000_000
        return {
            "user": user,
            **history,
            "candidate": [self.random.randrange(self.config.num_items) for _ in range(candidates)],
            "now": last + self.random.randrange(1, 10_000),
        }


def features_of(rows):
    """`build_features` from rows of `Events.row`."""

    def flat(key):
        return torch.tensor([value for row in rows for value in row[key]], dtype=torch.int64)

    return build_features(
        user=torch.tensor([row["user"] for row in rows], dtype=torch.int64),
        item=flat("item"),
        action=flat("action"),
        time=flat("time"),
        history_lengths=torch.tensor([len(row["item"]) for row in rows], dtype=torch.int64),
        candidate=flat("candidate"),
        num_candidates=torch.tensor([len(row["candidate"]) for row in rows], dtype=torch.int64),
        now=torch.tensor([row["now"] for row in rows], dtype=torch.int64),
    )


def reference_scores(model, rows):
    """Scores of `rows` in float64 from the model's weights and nothing else of it."""
    weights = {name: weight.double() for name, weight in model.state_dict().items()}
    scores = [_row_scores(model.config, weights, row) for row in rows]
    return torch.cat(scores) if scores else torch.empty(0, dtype=torch.float64)


def relative_error(got, want):
    """Largest difference relative to the largest value; give it many scores: a single one may be near 0."""
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


def _row_scores(config, w, row):
    n, tokens = len(row["item"]), len(row["item"]) + len(row["candidate"])
    x = torch.zeros(tokens, config.embedding_dim, dtype=torch.float64)
    for t in range(tokens):
        history = t < n
        item = row["item"][t] if history else row["candidate"][t - n]
        x[t] = w["embeddings.embeddings.item.weight"][item]
        if history:
            x[t] += w["embeddings.embeddings.action.weight"][row["action"][t]]
        time = row["time"][t] if history else row["now"]
        before = row["time"][min(t, n) - 1] if min(t, n) > 0 else time
        minutes = max(time - before, 0) / 60
        bucket = math.sqrt(minutes) if config.time_bucket_fn == "sqrt" else math.log(max(minutes, 1e-9))
        bucket = min(max(math.floor(bucket), 0), config.num_time_buckets)
        position = min(t, n, config.max_positions - 1)
        x[t] = x[t] * math.sqrt(config.embedding_dim) + w["encoder._position_embeddings_weight"][position]
        x[t] += w["encoder._timestamp_embeddings_weight"][bucket]

    def visible(i, j):
        near = config.max_attn_len == 0 or min(i, n) - j <= config.max_attn_len
        return i == j or (j < n and (i >= n or j <= i) and near)

    sees = torch.tensor([[float(visible(i, j)) for j in range(tokens)] for i in range(tokens)], dtype=torch.float64)
    sees = sees.view(tokens, tokens)

    heads = config.num_heads
    for layer in range(config.num_layers):
        p = {name.split(".")[2]: value for name, value in w.items() if name.startswith(f"layers.{layer}.")}
        uvqk = _silu(
            _norm(x, p["_input_norm_weight"], p["_input_norm_bias"], 1e-6) @ p["_uvqk_weight"] + p["_uvqk_beta"]
        )
        wide, narrow = heads * config.v_dim, heads * config.qk_dim
        u, v = uvqk[:, :wide], uvqk[:, wide : 2 * wide].reshape(tokens, heads, -1)
        q = uvqk[:, 2 * wide : 2 * wide + narrow].reshape(tokens, heads, -1)
        k = uvqk[:, 2 * wide + narrow :].reshape(tokens, heads, -1)
        out = []
        for head in range(heads):
            weight = _silu(q[:, head] @ k[:, head].T / math.sqrt(config.qk_dim)) * sees / config.attn_norm_len
            out.append(weight @ v[:, head])
        o = _norm(torch.cat(out, 1), p["_output_norm_weight"], p["_output_norm_bias"], 1e-6)
        x = x + (o * u) @ p["_output_weight"]

    y = _norm(x[n:], w["head.0.weight"], w["head.0.bias"], 1e-5)
    y = _silu(y @ w["head.1.weight"].T + w["head.1.bias"])
    return (y @ w["head.3.weight"].T + w["head.3.bias"])[:, 0]


def _silu(x):
    return x / (1 + torch.exp(-x))


def _norm(x, weight, bias, eps):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + eps) * weight + bias
