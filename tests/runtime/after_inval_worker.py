"""Runs the kernel of ``barrier_after_inval`` on a GPU, in a process of its own: what it does is not defined by PTX.

Prints its answers as a line of JSON. The checkout and its tests are on PYTHONPATH.
"""

from __future__ import annotations

import json

import barrier_after_inval as subject
import cupy

import cudatma
from cudatma.build.kernel import default_target


def main() -> None:
    kernel = cudatma.compile(subject.SOURCE, None, target=default_target(), template=True, debug=False)
    source, out = (cupy.asarray(array) for array in subject.operands())
    kernel.launch(1, 32, (source, out, 1))
    cupy.cuda.runtime.deviceSynchronize()
    print(json.dumps(out.get().tolist()))


if __name__ == "__main__":
    main()
