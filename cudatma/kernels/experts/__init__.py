"""marlin_moe, a layer of experts with int4 weights: routing, and two grouped GEMMs."""
