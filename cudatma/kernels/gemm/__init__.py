"""Dense GEMM: fp16, bf16 or fp8 operands in a TMA ring, fp32 accumulation, with wgmma (SM90) or mma.sync (SM120)."""
