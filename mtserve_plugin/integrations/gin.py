"""The cache configured by gin-config: importing this module registers its names in the module `mtserve_plugin`.

`CacheConfig`, `HierarchicalKVCache`, `NoCache` and `attach` take their options from bindings. A serving script calls
`attach_cache(model)`; which cache that is, and how large, is written in gin:

    import mtserve_plugin.integrations.gin
    attach_cache.cache = @HierarchicalKVCache  # or @NoCache: recompute through the same code
    CacheConfig.attn_norm_len = 4096
    CacheConfig.num_pages = 40960
    attach.user_feature = "user_id"

Layers, heads, dimensions and dtype are read from the model, the device too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn

from mtserve_plugin import cache as caches
from mtserve_plugin import integrations
from mtserve_plugin.config import CacheConfig
from mtserve_plugin.errors import ConfigError, MissingDependencyError

_INSTALL = "pip install 'mtserve-plugin[gin]'"

try:
    import gin
except ImportError as error:
    raise MissingDependencyError(f"gin-config is not installed. Fix: {_INSTALL}") from error
if not hasattr(gin, "external_configurable"):
    raise MissingDependencyError(
        f"the module gin in {getattr(gin, '__file__', None) or list(gin.__path__)} is not gin-config. Fix: {_INSTALL}"
    )

_HOME = "mtserve_plugin"

Builder = Callable[[nn.Module], caches.KVCache]

_config = gin.external_configurable(CacheConfig, module=_HOME)
_attach = gin.external_configurable(integrations.attach, module=_HOME, denylist=["model", "cache", "sparse"])


@gin.configurable("HierarchicalKVCache", module=_HOME, denylist=["model"])
def hierarchical_kv_cache(
    model: nn.Module | None = None,
    config: CacheConfig | None = None,
    device: torch.device | str | None = None,
) -> caches.HierarchicalKVCache:
    """`mtserve_plugin.HierarchicalKVCache` for a model.

    Args:
        model: as for `CacheConfig.for_model`, whose other options are the bindings of `CacheConfig`.
        config: used as it is, instead of one for the model.
        device: `None` is where the model's layers are.

    Raises:
        ConfigError: there is neither a model nor a configuration, or an option is out of range.
        AttachError: the model is not known.
    """
    config = _config_for("HierarchicalKVCache", model, config)
    return caches.HierarchicalKVCache(config, _device_for(model, device))


@gin.configurable("NoCache", module=_HOME, denylist=["model"])
def no_cache(
    model: nn.Module | None = None,
    config: CacheConfig | None = None,
    device: torch.device | str | None = None,
) -> caches.NoCache:
    """`mtserve_plugin.NoCache` for a model; arguments and errors as those of `hierarchical_kv_cache`."""
    config = _config_for("NoCache", model, config)
    return caches.NoCache(config, _device_for(model, device))


@gin.configurable(module=_HOME, denylist=["model", "sparse"])
def attach_cache(
    model: nn.Module,
    cache: str | caches.KVCache | Builder | None = None,
    *,
    sparse: nn.Module | None = None,
) -> caches.KVCache:
    """Builds the cache that the configuration names for this model and attaches it with `attach`'s bindings.

    Args:
        model: as for `mtserve_plugin.attach`.
        cache: `@HierarchicalKVCache`, `@NoCache`, or any function that takes the model and returns a cache; the same
            as a string, `"scope/HierarchicalKVCache"`; or a cache that exists already, to be shared. Under a scope
            the bindings of that scope hold, those of `CacheConfig` too. `None` takes the string from the model's own
            configuration, `DlrmHSTUConfig.kv_cache` (`patches/0003-stu-hook.patch`).
        sparse: as for `mtserve_plugin.attach`.

    Returns:
        The cache, for its `stats()` and `close()`.

    Raises:
        ConfigError: no cache is named, the name is unknown, or an option is out of range.
        AttachError: as `mtserve_plugin.attach`; a cache that was built here is closed again.
    """
    named = _named_by(model) if cache is None else cache
    if isinstance(named, caches.KVCache):
        _attach(model, named, sparse=sparse)
        return named
    built = _build(named, model)
    try:
        _attach(model, built, sparse=sparse)
    except BaseException:
        built.close()
        raise
    return built


def _named_by(model: nn.Module) -> str:
    name = integrations.integration_of(model).cache_name(model)
    if name is None:
        raise ConfigError(
            "attach_cache.cache: no cache is named. Bind attach_cache.cache = @HierarchicalKVCache (or @NoCache), or "
            "name one in the model's configuration: kv_cache='HierarchicalKVCache' (patches/0003-stu-hook.patch)"
        )
    return name


def _build(named: object, model: nn.Module) -> caches.KVCache:
    build = named
    if isinstance(named, str):
        try:
            build = gin.get_configurable(named.removeprefix("@"))
        except (ValueError, KeyError) as error:
            raise ConfigError(
                f"cache={named!r} names no configurable of gin ({error}); use 'HierarchicalKVCache' or 'NoCache', with "
                "a scope in front if it is to have its own sizes"
            ) from None
    if not callable(build):
        raise ConfigError(f"cache={named!r} is no cache; use @HierarchicalKVCache or @NoCache")
    built = build(model)
    if not isinstance(built, caches.KVCache):
        raise ConfigError(f"cache={named!r} made a {type(built).__name__} of the model; it has to return a KVCache")
    return built


def _config_for(name: str, model: nn.Module | None, config: CacheConfig | None) -> CacheConfig:
    if config is not None:
        return config
    if model is None:
        raise ConfigError(
            f"{name} is built for a model and was given none. Write @{name} instead of @{name}(), or bind its "
            "geometry as well: "
            f"{name}.config = @CacheConfig()"
        )
    bound = gin.get_bindings(f"{_HOME}.CacheConfig")
    options = dataclasses.asdict(CacheConfig.for_model(model, **bound))
    # Through gin's own wrapper, so that gin.operative_config_str() shows the sizes.
    return _config(**{name: value for name, value in options.items() if name not in bound})


def _device_for(model: nn.Module | None, device: torch.device | str | None) -> torch.device | str:
    if device is not None:
        return device
    return "cpu" if model is None else integrations.integration_of(model).device(model)
