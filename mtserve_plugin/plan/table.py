"""What `mtserve plan` prints. Takes plain values: imports neither torch nor numpy."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mtserve_plugin.plan.memory import Geometry, onload_pages
from mtserve_plugin.replay.options import MODELS
from mtserve_plugin.report import bytes_text, print_facts, print_next


def print_plan(out: Console, plan: dict[str, Any]) -> None:
    """A plan's `to_json()`: what users weigh, how memory is divided, what would be found, what to paste."""
    print_facts(out, _facts(plan))
    out.print()
    out.print(_memory(plan))
    out.print(_predictions(plan))
    told = "" if plan["options"]["trace"] else " imagined"
    out.print(
        f"Simulated: {plan['simulated_requests']:,}{told} requests of {plan['simulated_users']:,} users, tiers in "
        "proportion; the first third fills the cache and is not counted. Computed tokens are per request. Bytes per "
        "second are at the rate above; compare them with what your link between host and device moves.",
        soft_wrap=True,
    )
    out.print("\nThe configuration; set attn_norm_len to the divisor that your model was trained with:\n")
    out.print(_paste(plan["config"]), soft_wrap=True)
    out.print()
    print_next(out, "attach(model, HierarchicalKVCache(config), ...), see docs/integration.md")


def print_appendix_c(out: Console) -> None:
    """The paper's memory table (appendix C), computed, beside its own figures."""
    geometry = Geometry(MODELS["paper"])
    batch, longest, pages = 8, 40_008, 40_960
    formula, printed = onload_pages(batch, longest, geometry.page_size), 10_008
    tokens = batch * longest
    mib = 1 << 20
    table = Table(
        title="Device memory of the paper's configuration (appendix C), MiB",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for name in ("part", "computed", "paper's"):
        table.add_column(name, justify="left" if name == "part" else "right")
    width = geometry.width * 2
    layers = geometry.shape.layers
    per_layer = geometry.paper_workbench_bytes(tokens)
    rows = [
        (f"page table, {pages + printed:,} pages", (pages + printed) * geometry.page_bytes, "25,484"),
        (f"  with onload pages by the formula ({formula:,})", (pages + formula) * geometry.page_bytes, "25,484 ¹"),
        ("projections u, v, q, k, one layer", tokens * 4 * width, "1,250"),
        ("outputs, one layer", tokens * 2 * width, "625"),
        (f"workbench, {layers} layers with buffers of their own", layers * per_layer, "15,000"),
        ("workbench, buffers reused by all layers", per_layer, "-"),
    ]
    for name, count, paper in rows:
        table.add_row(name, f"{count / mib:,.0f}", paper)
    out.print(table)
    out.print(
        "¹ The paper gives 10,008 onload pages where its formula, the batch's longest histories over the page size, "
        "gives 10,002.",
        soft_wrap=True,
    )
    out.print(
        f"A token takes {bytes_text(geometry.token_bytes)}; 1,000 users of 10,000 tokens take "
        f"{1000 * 10_000 * geometry.token_bytes / 1e9:.0f} GB.",
        soft_wrap=True,
    )


def _facts(plan: dict[str, Any]) -> list[tuple[str, str]]:
    users, options, shape = plan["users"], plan["options"], plan["config"]
    whole = plan["host_tokens"] / max(users["users"] * users["tokens"], 1)
    rate = plan["requests_per_s"]
    return [
        (
            "users",
            f"{users['users']:,}, {users['tokens']:,.0f} tokens on average, {users['longest']:,} at most"
            + (f" (from {options['trace']})" if options["trace"] else ""),
        ),
        (
            "requests",
            f"{rate:,.2f} per second: each user every {_duration(users['interval_s'])}, "
            f"{users['new_tokens']:.1f} new tokens in between",
        ),
        (
            "model",
            f"{shape['num_layers']} layers, {shape['num_heads']} heads of {shape['qk_dim']}, {shape['dtype']}: "
            f"{bytes_text(plan['token_bytes'])} per token, {bytes_text(plan['user_bytes'])} per user, "
            f"{bytes_text(plan['working_set_bytes'])} for all",
        ),
        (
            "host tier",
            f"{bytes_text(options['host_bytes'])}: {plan['host_tokens']:,} tokens, "
            f"{100 * min(whole, 1):.1f}% of all users' histories",
        ),
    ]


def _memory(plan: dict[str, Any]) -> Table:
    memory, options = plan["memory"], plan["options"]
    table = Table(title="device memory", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("part", "size", "what it is"):
        table.add_column(name, justify="right" if name == "size" else "left")
    held = memory["pages"] * options["page_size"]
    share = 100 * held / max(plan["users"]["users"] * plan["users"]["tokens"], 1)
    table.add_row(
        "pages",
        bytes_text(memory["pages_bytes"]),
        f"{memory['pages']:,} pages of {options['page_size']} tokens: {share:.1f}% of all users' histories",
    )
    if memory["onload_pages"]:
        table.add_row(
            "onload region",
            bytes_text(memory["onload_bytes"]),
            f"{memory['onload_pages']:,} pages: a batch's histories",
        )
    table.add_row(
        "workbench",
        bytes_text(memory["workbench_bytes"]),
        f"workbench_tokens={memory['workbench_tokens']}: {options['batch_size']} requests without any hit",
    )
    table.add_row("transient", bytes_text(memory["transient_bytes"]), "embeddings and outputs of such a batch")
    table.add_row("together", bytes_text(plan["memory_total_bytes"]), "without the model's weights")
    return table


def _predictions(plan: dict[str, Any]) -> Table:
    table = Table(
        title="what would be found", title_justify="left", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False
    )
    names = (
        "policy",
        "pages",
        "device\nhits",
        "total\nhits",
        "computed\ntokens",
        "onload\nper s",
        "offload\nper s",
    )
    for name in names:
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    planned = plan["memory"]["pages"]
    rows = sorted(plan["predictions"], key=lambda row: row["pages"] != planned)
    for number, row in enumerate(rows):
        other = row["pages"] != planned
        if other and rows[number - 1]["pages"] == planned:
            table.add_section()
        table.add_row(
            _NAMES[row["policy"]],
            f"{row['pages']:,}",
            f"{100 * row['device_hit_ratio']:.2f}%",
            f"{100 * row['total_hit_ratio']:.2f}%",
            f"{row['computed_tokens']:.1f}",
            bytes_text(row["onload_bytes_per_s"]),
            bytes_text(row["offload_bytes_per_s"]),
        )
    return table


_NAMES = {"device": "pages alone", "paper": "paper (full chunks)", "ours": "default (tails too)"}


def _paste(config: dict[str, Any]) -> str:
    lines = [f"    {name}={value!r}," for name, value in config.items()]
    return "from mtserve_plugin import CacheConfig\n\nconfig = CacheConfig(\n" + "\n".join(lines) + "\n)"


def _duration(seconds: float) -> str:
    for size, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
