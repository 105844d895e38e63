"""Writes docs/configuration.md from `CacheConfig`: its fields, its docstring, and the errors that it raises.

python docs/generate_configuration.py            # writes the file; --check only compares, exit code 1 if it differs
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from mtserve_plugin import CacheConfig, ConfigError, config

FILE = Path(__file__).with_name("configuration.md")

# What no code knows: which options belong together, and when a default stops being right.
SECTIONS: dict[str, dict[str, str]] = {
    "The model": {
        "num_layers": "never alone: it is the model's",
        "num_heads": "never alone: it is the model's",
        "qk_dim": "never alone: it is the model's",
        "v_dim": "never alone: it is the model's",
        "attn_norm_len": "set it to what the model was trained with; another constant is another model",
        "dtype": "never alone: it is the model's. 16 bits take half the memory of 32",
        "attn_scale": "the model scales q·k by something else than `qk_dim ** -0.5`",
        "max_attn_len": "the model was trained with a window",
    },
    "The device tier": {
        "page_size": "rarely. Smaller pages waste less at the end of a history, larger ones make shorter page tables",
        "num_pages": "first of all: it is the device memory that you give away. `device_hit_ratio` says what it buys",
        "onload_pages": "with staged onloads: room for what one batch may bring, in pages",
        "busy_wait_ms": "`rows_without_room` rises although pages become free within milliseconds",
        "max_open_batches": "more batches than this are in flight at once (threads x models); see `refused_batches`",
    },
    "The host tier": {
        "chunk_size": "rarely. Smaller chunks are more and shorter copies; `mtserve simulate --chunks` counts hits",
        "host_bytes": "unless the device holds everybody",
        "offload_quota_tokens": "`offloads_refused_quota` and `lost_tokens` rise together",
        "tail_write_back": "to measure the paper's policy, which writes less and loses tails",
        "onload_strategy": "`mtserve bench transfer` finds the other one faster on your machine",
        "read_onload_region": "with staged onloads: waits for layer 0 dominate, or rows find no pages",
        "offload_strategy": "as `onload_strategy`",
    },
}

# A configuration that is right, and one change each that makes it wrong: the messages are the code's own.
_SOUND: dict[str, Any] = {"num_layers": 8, "num_heads": 4, "qk_dim": 128, "v_dim": 128, "attn_norm_len": 20_480}
_REFUSED: tuple[dict[str, Any], ...] = (
    {"num_pages": 0},
    {"num_pages": 1e6},
    {"dtype": "int8"},
    {"attn_scale": 0},
    {"page_size": 4},
    {"page_size": 48},
    {"num_pages": 2**31},
    {"host_bytes": 1 << 20},
    {"host_bytes": 1 << 30, "offload_quota_tokens": 512},
    {"host_bytes": 1 << 30, "onload_strategy": "staged"},
    {"read_onload_region": True},
    {"offload_strategy": "lazy"},
)

_DERIVED = ("token_bytes", "table_bytes", "chunk_bytes", "num_chunks", "slot_tokens")


def render() -> str:
    """The whole file."""
    fields = {field.name: field for field in dataclasses.fields(CacheConfig)}
    meanings = described(inspect.getdoc(CacheConfig) or "")
    told = [name for section in SECTIONS.values() for name in section]
    if sorted(told) != sorted(fields) or sorted(meanings) != sorted(fields):
        differing = sorted(set(told) ^ set(fields) | set(meanings) ^ set(fields))
        raise SystemExit(f"{', '.join(differing)}: describe it in CacheConfig's docstring and in SECTIONS here")
    parts = [_HEAD]
    for title, section in SECTIONS.items():
        head = "| option | type | default | at least | meaning | when to change it |\n|---|---|---|---|---|---|\n"
        parts.append(f"## {title}\n\n{head}")
        parts[-1] += "".join(_row(fields[name], meanings[name], advice) for name, advice in section.items())
    parts.append(_sizes())
    parts.append(_refused())
    return "\n".join(parts)


def described(doc: str) -> dict[str, str]:
    """The Args of a docstring: name to text."""
    arguments = doc.split("Args:\n", 1)[1].split("\n\n", 1)[0]
    found = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", arguments, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text).strip() for name, text in found}


def _row(field: dataclasses.Field[Any], meaning: str, advice: str) -> str:
    default = "needed" if field.default is dataclasses.MISSING else f"`{_shown(field.default)}`"
    least = config._LEAST.get(field.name, "")
    kind = str(field.type).replace("|", "or")
    return f"| `{field.name}` | {kind} | {default} | {least} | {meaning.rstrip('.')} | {advice} |\n"


def _sizes() -> str:
    paper = CacheConfig(**_SOUND, onload_pages=10_008, host_bytes=768 << 30)
    documented = {name: inspect.getdoc(getattr(CacheConfig, name)) or "" for name in _DERIVED}
    rows = "".join(
        f"| `{name}` | {_sentence(text)} | {getattr(paper, name):,} |\n" for name, text in documented.items()
    )
    return (
        "## What follows from it\n\n"
        "Properties of a `CacheConfig`. The figures are those of the paper's model and pages "
        f"(`CacheConfig({_arguments(_SOUND)}, onload_pages=10_008, host_bytes=768 << 30)`).\n\n"
        f"| property | meaning | at the paper's size |\n|---|---|---|\n{rows}"
    )


def _refused() -> str:
    rows = ""
    for change in _REFUSED:
        try:
            CacheConfig(**_SOUND | change)
        except ConfigError as error:
            rows += f"| `{_arguments(change)}` | {error} |\n"
        else:
            raise SystemExit(f"{_arguments(change)} is not refused: correct _REFUSED here")
    return (
        "## What is refused\n\n"
        "`ConfigError`, before any memory is taken. The same configuration with one change:\n\n"
        f"| change | message |\n|---|---|\n{rows}"
    )


def _arguments(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={_shown(value)}" for name, value in options.items())


def _shown(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        shift = next((bits for bits in (30, 20) if value and value % (1 << bits) == 0), 0)
        return f"{value >> shift} << {shift}" if shift else f"{value:_}" if value >= 10_000 else str(value)
    return repr(value).replace("'", '"')


def _sentence(text: str) -> str:
    return text.split("\n\n")[0].replace("\n", " ").rstrip(".").replace("|", "\\|")


_HEAD = """\
# Configuration

<!-- Written by docs/generate_configuration.py from CacheConfig: change it there. -->

`CacheConfig` is frozen and checked when it is built. `CacheConfig.for_model(model, ...)` reads the model's part of it
from a model that `attach` knows, `HSTURankerConfig.cache_config(...)` from the ranker in `mtserve_plugin/models/`;
`CacheConfig.from_dict` takes parsed JSON, [integration.md](integration.md#by-gin) shows gin.
`config.replace(num_pages=...)` is a checked copy. How large things should be: [operating.md](operating.md#sizes).
"""


if __name__ == "__main__":
    text = render()
    if "--check" in sys.argv[1:]:
        sys.exit(FILE.read_text() != text)
    FILE.write_text(text)
