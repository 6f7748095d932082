"""Marlin GEMM: W4A16 matrix multiplication with weights streamed by TMA, for SM90 and SM120."""
