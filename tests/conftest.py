"""Pools of gloo ranks that all multi-rank tests share, and one thread per process."""

import pytest
import torch

from tests.ranks import RankPool


def pytest_configure(config):
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def four_ranks():
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture
def eight_ranks():
    pool = RankPool(8)
    yield pool
    pool.close()
