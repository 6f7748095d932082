"""marlin_moe, a layer of experts with quantized weights: routing, and two grouped GEMMs."""
