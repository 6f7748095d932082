#!/bin/bash
# build.sh VLLM CUTLASS FOLDER: libmarlin.so (fp16), libmachete.so (fp16), libmachete_bf16.so and VERSION in FOLDER, for
# sm_90.
# VLLM: its unpacked source distribution (0.33.0). CUTLASS: a checkout (4.7). JOBS=4: so many compiles at once (1).
# Objects stay in FOLDER/objects; what is there is not compiled again.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
vllm=$(cd "$1" && pwd) cutlass=$(cd "$2" && pwd)
mkdir -p "$3/objects"
folder=$(cd "$3" && pwd)
objects=$folder/objects
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}

# The few headers of torch that the kernels include are stand-ins: nothing of it is needed.
for header in torch_utils.h torch/csrc/stable/{accelerator,library,ops,tensor}.h \
  torch/headeronly/core/ScalarType.h torch/headeronly/util/{BFloat16,Exception,Half,shim_utils}.h; do
  mkdir -p "$(dirname "$objects/$header")"
  echo '#include "torch_stand_in.h"' >"$objects/$header"
done
# vLLM's host code around the kernels, without the functions that take tensors.
marlin=$vllm/csrc/quantization/marlin
sed -e '/^#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 750/,/^#else/d' -e '/^}  \/\/ namespace marlin/q' \
  "$marlin/marlin.cu" >"$objects/marlin_body.cu"
sed '/^#define CALL_IF/,$d' "$marlin/gptq_marlin_repack.cu" >"$objects/repack_body.cu"

flags=(-std=c++17 -O1 -DNDEBUG --expt-relaxed-constexpr -Xcompiler -fPIC -w -I"$here" -I"$objects" -I"$vllm/csrc")
hopper=(-gencode arch=compute_90a,code=sm_90a -I"$cutlass/include" -I"$cutlass/tools/util/include")
commands=()
compile() { # OBJECT SOURCE FLAGS...
  local object=$objects/$1 source=$here/$2
  [ -f "$object" ] && return
  commands+=("$(printf '%q ' "$nvcc" "${flags[@]}" "${@:3}" -c "$source" -o "$object.part") && mv $(printf '%q ' "$object.part" "$object") && echo $1")
}
# As vLLM builds it for Hopper: from the PTX of compute_80.
compile marlin.o marlin.cu -gencode arch=compute_80,code=sm_90 -I"$marlin"
# Channels, tokens, CTAs of a cluster along the channels: all tiles of vLLM's heuristic.
schedules=("128 256 2" "128 128 2" "256 128 2" "128 64 2" "256 64 2" "128 32 2" "256 32 2" "128 16 1" "256 16 1")
entries=
for schedule in "${schedules[@]}"; do
  entries+="ENTRY(entry_${schedule// /_}) "
done
for dtype in fp16 bf16; do
  element=()
  [ $dtype = fp16 ] || element=(-DMACHETE_BF16)
  compile "machete_${dtype}_prepack.o" machete.cu "${hopper[@]}" "${element[@]}" -DMACHETE_PREPACK
  for schedule in "${schedules[@]}"; do
    read -r channels tokens cluster <<<"$schedule"
    name=${schedule// /_}
    compile "machete_${dtype}_$name.o" machete.cu "${hopper[@]}" "${element[@]}" -DSCHEDULE_NAME="entry_$name" -DTILE_CHANNELS="$channels" -DTILE_TOKENS="$tokens" -DTILE_CLUSTER="$cluster"
  done
done
echo "${#commands[@]} to compile"
[ ${#commands[@]} -eq 0 ] || printf '%s\0' "${commands[@]}" | xargs -0 -P "${JOBS:-1}" -n 1 bash -c

echo "$entries" >"$objects/machete_entries.inc"
link=("$nvcc" "${flags[@]}" -shared -cudart static)
"${link[@]}" "$here/machete_table.cu" "$objects"/machete_fp16_*.o -o "$folder/libmachete.so"
"${link[@]}" "$here/machete_table.cu" "$objects"/machete_bf16_*.o -o "$folder/libmachete_bf16.so"
"${link[@]}" "$objects/marlin.o" -o "$folder/libmarlin.so"
sed -n 's/^Version: /vLLM /p' "$vllm/PKG-INFO" >"$folder/VERSION"
ls -l "$folder"/*.so
