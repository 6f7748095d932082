// Instead of the file that vLLM's generator writes: fp16, u4b8, groups of 128 (8 blocks of 16), four stages.
// clang-format off
#define PICK(THREADS, M_BLOCKS, N_BLOCKS, K_BLOCKS, IS_M_8)                                                        \
  if (a_type == vllm::kFloat16 && b_type == vllm::kU4B8 && c_type == vllm::kFloat16 && s_type == vllm::kFloat16 && \
      threads == THREADS && thread_m_blocks == M_BLOCKS && thread_n_blocks == N_BLOCKS &&                          \
      thread_k_blocks == K_BLOCKS && m_block_size_8 == IS_M_8 && stages == 4 && group_blocks == 8 && !is_zp_float) \
    kernel = Marlin<vllm::kFloat16.id(), vllm::kU4B8.id(), vllm::kFloat16.id(), vllm::kFloat16.id(), THREADS,      \
                    M_BLOCKS, N_BLOCKS, K_BLOCKS, IS_M_8, 4, 8, false>;
#define PICK_SMALL(M_BLOCKS, IS_M_8)       \
  PICK(128, M_BLOCKS, 8, 4, IS_M_8)        \
  PICK(128, M_BLOCKS, 4, 8, IS_M_8)
PICK(256, 1, 8, 8, true) PICK_SMALL(1, true)
PICK(256, 1, 8, 8, false) PICK_SMALL(1, false)
PICK(256, 2, 16, 4, false) PICK_SMALL(2, false)
PICK(256, 3, 16, 4, false) PICK_SMALL(3, false)
PICK(256, 4, 16, 4, false) PICK_SMALL(4, false)
// clang-format on
