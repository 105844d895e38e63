"""A small ranking service to try the cache on: `generative_recommenders` from a checkout, or stand-ins for it.

Not part of the package. Weights are random, of the size that training leaves; users and their events are random too.
"""

from __future__ import annotations

import atexit
import importlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Ids per table, user ids too.
ROWS = 500

HOST = "generative_recommenders"
CHECKOUT = "GENERATIVE_RECOMMENDERS"

_ROOT = str(Path(__file__).resolve().parents[1])


@dataclass(frozen=True)
class Service:
    """Where models and requests come from.

    Attributes:
        name: whose classes the models are of.
        build: `build(seed=0, **options)`, a `DlrmHSTU` in eval mode; options are fields of its configuration.
        users: `users(model, seed=0)`, what is known of the users: `add(user)`, `grow(user, events)`,
            `edit(user, index)`, and `request(users, candidates)`, which gives the two arguments of the model's forward.
    """

    name: str
    build: Callable[..., Any]
    users: Callable[..., Any]


def start() -> Service:
    """The service for the rest of the process; the environment variable GENERATIVE_RECOMMENDERS names a checkout."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(serving(os.environ.get(CHECKOUT)))


@contextmanager
def serving(checkout: str | None) -> Iterator[Service]:
    """The service, on the checkout in this folder, or on the doubles of `tests/doubles`."""
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")
        logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
        if _ROOT not in sys.path:
            sys.path.append(_ROOT)
        yield _from_checkout(checkout) if checkout else _from_doubles(stack)


def _from_doubles(stack: ExitStack) -> Service:
    from tests import doubles
    from tests.doubles.common import HammerKernel
    from tests.integrations import dlrm_double, streams

    stack.enter_context(doubles.installed())
    sys.modules[f"{HOST}.modules.dlrm_hstu"] = dlrm_double

    def build(seed: int = 0, **options: Any) -> Any:
        model = dlrm_double.DlrmHSTU(dlrm_double.DlrmHSTUConfig(**options), ROWS)
        model.set_hammer_kernel(HammerKernel.PYTORCH)
        return streams.trained_size(model, seed).eval()

    def users(model: Any, seed: int = 0) -> Any:
        embedded = ("item_id", "candidate_id", "category_id", "candidate_category_id", "user_id", "cities")
        return streams.Users(model._hstu_configs, dict.fromkeys(embedded, ROWS), seed)

    return Service(f"stand-ins for {HOST} (tests/doubles)", build, users)


def _from_checkout(checkout: str) -> Service:
    importlib.import_module("torchrec")
    sys.path.insert(0, checkout)
    try:
        # The host prints remarks about GPUs while it is imported.
        with redirect_stdout(io.StringIO()):
            names = ("common", "dlrm_v3.configs", "dlrm_v3.inference.inference_modules", "modules.dynamic_stu")
            common, configs, inference, _ = (importlib.import_module(f"{HOST}.{name}") for name in names)
    finally:
        sys.path.remove(checkout)
    from tests.integrations import streams

    sizes: dict[str, int] = {}
    small = {
        "hstu_num_heads": 2,
        "hstu_attn_linear_dim": 24,
        "hstu_attn_qk_dim": 16,
        "hstu_attn_num_layers": 3,
        "hstu_embedding_table_dim": 32,
        "hstu_preprocessor_hidden_dim": 48,
        "hstu_transducer_embedding_dim": 32,
    }

    def build(seed: int = 0, **options: Any) -> Any:
        config = configs.get_hstu_configs("streaming-400m")
        tables = configs.get_embedding_table_config("streaming-400m")
        for name, value in (small | options).items():
            setattr(config, name, value)
        for table in tables.values():
            table.embedding_dim = config.hstu_embedding_table_dim
        model = inference.get_hstu_model(tables, config, table_device="cpu", max_hash_size=ROWS)
        model.set_hammer_kernel(common.HammerKernel.PYTORCH)
        sizes.update({name: table.num_embeddings for table in tables.values() for name in table.feature_names})
        return streams.trained_size(model, seed).eval()

    def users(model: Any, seed: int = 0) -> Any:
        return streams.Users(model._hstu_configs, sizes, seed)

    return Service(f"{HOST} (its own checkout)", build, users)
