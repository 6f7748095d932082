"""How many clusters of blocks run at the same time on a card. Pure."""

from __future__ import annotations

#: By blocks of a cluster, the part of a card's multiprocessors that can be in some. A card with 132 of them, in parts
#: of 18 and fewer, had room for 66, 39, 30, 22, 17 and 15 clusters of 2, 3, 4, 5, 6 and 8 blocks, one a multiprocessor.
#: [H200, cuOccupancyMaxActiveClusters]
_IN_CLUSTERS = {1: 1.0, 2: 1.0, 3: 0.88, 4: 0.91, 5: 0.84, 6: 0.78, 8: 0.91}
#: Blocks that may divide a depth.
CLUSTER_K = tuple(_IN_CLUSTERS)


def clusters_at_once(cluster_k: int, multiprocessors: int) -> int:
    """Clusters of so many blocks that run at the same time, each block on a multiprocessor of its own."""
    return int(multiprocessors * _IN_CLUSTERS[cluster_k]) // cluster_k
