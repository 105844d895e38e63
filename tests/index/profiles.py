"""How long the property tests look: HYPOTHESIS_PROFILE=thorough for many more, and fresh, examples."""

import os

from hypothesis import HealthCheck, Phase, settings

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


def machine_settings(examples, steps, thorough_examples):
    return settings(
        max_examples=thorough_examples if THOROUGH else examples,
        stateful_step_count=2 * steps if THOROUGH else steps,
        derandomize=not THOROUGH,
        phases=(Phase.generate, Phase.shrink),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
