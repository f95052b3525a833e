"""Where ranks sit and what a plan costs there: topology and the closed-form cost model."""

from topoep_titan.cluster.cost_model import ModelDims, modelled_time
from topoep_titan.cluster.topology import Cluster, load_cluster

__all__ = ["Cluster", "ModelDims", "load_cluster", "modelled_time"]
