"""Where experts and tokens should live: co-selection statistics, placement, next-rank prediction.

The slow clock beside the planners: what it decides stays for hundreds of steps. Pure functions on
recorded or drawn routing; training carries them out in ``titan``.
"""

from topoep_titan.placement.native import place
from topoep_titan.placement.quality import PlacementQuality, placement_quality
from topoep_titan.placement.sets import BALANCE_WEIGHT, Effort

__all__ = ["BALANCE_WEIGHT", "Effort", "PlacementQuality", "place", "placement_quality"]
