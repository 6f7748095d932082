"""Marlin GEMM: W4A16 with weights that TMA streams. SM90 and SM120."""
