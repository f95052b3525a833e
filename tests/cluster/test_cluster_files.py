"""Every cluster file loads, is called like its file, and says where each figure comes from."""

import pytest

from topoep_titan.cluster import load_cluster
from topoep_titan.cluster.topology import CLUSTER_FOLDER

FILES = sorted(CLUSTER_FOLDER.glob("*.toml"))


def test_the_named_clusters_exist():
    named = {"h800_4x8", "h800_2x8", "mi300x_8x8", "h100_8x8", "gb200_nvl72", "cpu_local"}
    assert {file.stem for file in FILES} >= named


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_cluster_file(file):
    cluster = load_cluster(file.stem)
    assert cluster.name == file.stem
    assert cluster.bw_near >= cluster.bw_far  # bytes/s; a node is the faster domain
    for line in file.read_text().splitlines():
        key = line.partition("=")[0].strip()
        if key in ("flops", "bw_far", "bw_near", "lat_far", "lat_near", "plan_us"):
            assert "#" in line, f"{key} has no source"
