"""load_trace: a trace by name or path, with its options by keyword."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from mtserve_plugin.errors import ConfigError
from mtserve_plugin.workload.log_files import Paths, find_log_files, is_kuairand
from mtserve_plugin.workload.log_format import LogFormat
from mtserve_plugin.workload.log_reader import read_log
from mtserve_plugin.workload.log_trace import LogTrace
from mtserve_plugin.workload.synthetic import SyntheticTrace
from mtserve_plugin.workload.synthetic_config import KUAIRAND_LIKE, MT_LIKE, SyntheticConfig
from mtserve_plugin.workload.trace import Trace

SYNTHETIC: dict[str, SyntheticConfig] = {"kuairand-like": KUAIRAND_LIKE, "mt-like": MT_LIKE}

_SCALES = ("users", "requests", "max_history", "mean_history")
_FORMAT = tuple(field.name for field in dataclasses.fields(LogFormat))
_SEGMENTATION = ("interval_s", "max_history", "at_cap", "min_history", "name")


def load_trace(
    source: Paths, *, limit: int | None = None, shapes: Mapping[str, SyntheticConfig] = SYNTHETIC, **options: Any
) -> Trace:
    """Opens a trace.

    Args:
        source: a key of `shapes`; files of events (see `find_log_files`); or "package.module:name" of a callable
            of yours that takes the options and returns a `Trace`.
        limit: only the first so many requests.
        shapes: synthetic traces by name; by default "kuairand-like" and "mt-like".
        **options: for the synthetic ones the fields of `SyntheticConfig`; when `users` or `requests` is among
            them, the rest is scaled along (`SyntheticConfig.scaled`). For files the fields of `LogFormat` and
            `interval_s`, `max_history`, `at_cap`, `min_history` and `name` of `LogTrace`.

    Raises:
        ConfigError: an option is unknown or out of range.
        InputError: a file is missing or malformed.

    Example:
        >>> trace = load_trace("kuairand-like", users=40, requests=3000, max_history=4000, mean_history=1200)
        >>> len(next(trace.blocks()))
        3000
    """
    trace = _open(source, shapes, options)
    return trace if limit is None else trace.head(limit)


def _open(source: Paths, shapes: Mapping[str, SyntheticConfig], options: dict[str, Any]) -> Trace:
    if isinstance(source, str) and source in shapes:
        return SyntheticTrace(_shape(shapes[source], options))
    if isinstance(source, str) and ":" in source and not Path(source).exists():
        return _own(source, list(shapes), options)
    for name in options:
        if name not in _FORMAT + _SEGMENTATION:
            raise ConfigError(
                f"unknown option {name!r} for a log; known options: limit, {', '.join(_FORMAT + _SEGMENTATION)}"
            )
    told = LogFormat(**{name: options[name] for name in _FORMAT if name in options})
    given = {name: options[name] for name in _SEGMENTATION if name in options}
    return LogTrace(read_log(source, told), **{"name": _name(source)} | given)


def _shape(config: SyntheticConfig, options: dict[str, Any]) -> SyntheticConfig:
    if "users" in options or "requests" in options:
        scales = {name: options[name] for name in _SCALES if name in options}
        # One of the two alone keeps the requests per user.
        scales.setdefault("users", max(1, round(config.users * scales.get("requests", 0) / config.requests)))
        scales.setdefault("requests", round(config.requests * scales["users"] / config.users))
        config = config.scaled(**scales)
        options = {name: value for name, value in options.items() if name not in scales}
    return config.replace(**options)


def _own(source: str, names: list[str], options: dict[str, Any]) -> Trace:
    module, _, name = source.partition(":")
    try:
        make = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"source={source!r} is no file and no importable 'package.module:name' ({error}); give the path "
            f"of a log, {', '.join(map(repr, names))} or a callable of yours"
        ) from None
    trace = make(**options)
    if not isinstance(trace, Trace):
        raise ConfigError(f"source={source!r} returned a {type(trace).__name__}; it must return a Trace")
    return trace


def _name(source: Paths) -> str:
    files = find_log_files(source)
    if is_kuairand(files):
        return "kuairand-1k"
    return Path(files[0].name).stem
