"""Dense GEMM in fp16, bf16 and fp8 with fp32 accumulation."""
