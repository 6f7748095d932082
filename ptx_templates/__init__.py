"""The CUDA templates that ``cudatma.build.render`` renders; data only."""
