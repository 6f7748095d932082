"""How many clusters of CTAs run at the same time on a GPU. Pure."""

from __future__ import annotations

#: CTAs of a cluster -> part of a GPU's SMs that clusters of this size can use. A GPU with 132 SMs, in GPCs of 18 and
#: fewer, runs 66, 39, 30, 22, 17 and 15 clusters of 2, 3, 4, 5, 6 and 8 CTAs, one CTA on an SM.
#: [H200, cuOccupancyMaxActiveClusters]
_IN_CLUSTERS = {1: 1.0, 2: 1.0, 3: 0.88, 4: 0.91, 5: 0.84, 6: 0.78, 8: 0.91}
#: Numbers of CTAs that may divide K.
CLUSTER_K = tuple(_IN_CLUSTERS)


def clusters_at_once(cluster_k: int, sm_count: int) -> int:
    """Clusters of ``cluster_k`` CTAs that run at the same time, each CTA on an SM of its own."""
    return int(sm_count * _IN_CLUSTERS[cluster_k]) // cluster_k
