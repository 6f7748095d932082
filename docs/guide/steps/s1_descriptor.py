"""Step 1. A tensor map: what the TMA unit must know of an array, in 128 bytes.

A map holds a tensor's address, element type, sizes and pitches, and the box that one instruction copies. Sizes and
boxes count elements, pitches count bytes. Here: a box of 16 x 32 floats of a 100 x 200 array.
"""

from __future__ import annotations

from place import library

from cudatma import TensorMap

xp = library()
array = xp.zeros((100, 200), xp.float32)
tensor_map = TensorMap.from_array(array, box=(16, 32))
spec = tensor_map.spec
print(f"{spec.dtype.name}, {spec.dims} elements innermost first, rows {spec.strides_bytes} bytes apart")
print(f"one load counts {tensor_map.expected_bytes} bytes and takes {tensor_map.footprint_bytes} of shared memory,")
print(f"which begins at a multiple of {tensor_map.smem_alignment_bytes} bytes")
print("the 128 bytes, for `cudatma inspect`:", bytes(tensor_map).hex())
