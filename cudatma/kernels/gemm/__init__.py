"""Dense GEMM with fp16, bf16 and fp8 operands and fp32 accumulation."""
