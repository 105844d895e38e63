import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["positions", "models.features", "models.hstu"])
def test_examples_run(name):
    module = importlib.import_module(f"mtserve_plugin.{name}")
    # Names that the examples use and a module does not import itself.
    names = {"torch": importlib.import_module("torch")} | vars(module)
    result = doctest.testmod(module, extraglobs=names)
    assert result.attempted > 0
    assert result.failed == 0
