"""Dense GEMM: fp16 or bf16 operands, fp32 accumulation, wgmma out of a TMA ring. SM90."""
