import pytest

from tests.cache.scenario import make, one_torch_thread  # noqa: F401


@pytest.fixture(autouse=True)
def quick(one_torch_thread):  # noqa: F811
    pass
