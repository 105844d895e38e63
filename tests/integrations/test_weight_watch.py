"""Weights are watched whatever a forward in inference mode leaves behind."""

import torch
from torch import nn

from mtserve_plugin.integrations.generative_recommenders.weights import WeightWatch


def test_a_buffer_replaced_in_inference_mode_is_another_version():
    module = nn.Linear(2, 2)
    module.register_buffer("seen", torch.zeros(2))
    watch = WeightWatch([module], "7")
    version, fingerprint = watch.version()
    assert version == "7"
    assert watch.is_current(fingerprint)
    with torch.inference_mode():
        module.seen = torch.ones(2)
    changed, fingerprint = watch.version()
    assert changed != version
    assert watch.version() == (changed, fingerprint)
    with torch.no_grad():
        module.weight.add_(1)  # still seen
    assert watch.version()[0] not in (version, changed)
