"""The CUDA templates that ``cudatma.render`` renders; data only."""
