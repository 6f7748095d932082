"""Layers for benchmarks: five layers for all measurements, and the projections of public models."""

from __future__ import annotations

import argparse

from tools.model_layers import BENCHMARKED, MODELS, Shape, model_shapes

#: (K, N) of the layers for all measurements.
FIVE: tuple[Shape, ...] = ((4096, 4096), (4096, 12288), (8192, 8192), (8192, 28672), (28672, 8192))
#: Values of M, the rows of x in a call.
M_VALUES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
#: Layers that contain most of the weights of a 70B model.
LARGE: tuple[Shape, ...] = ((8192, 28672), (8192, 57344), (28672, 8192))


def all_shapes() -> tuple[Shape, ...]:
    """Return the five layers, followed by the additional layers of each model, in order of the models' importance."""
    return tuple(dict.fromkeys((*FIVE, *(shape for name in BENCHMARKED for shape in model_shapes(name)))))


def parse_shape(text: str) -> Shape:
    """Parse ``"8192x28672"`` into (8192, 28672), multiples of 64, or raise argparse's ArgumentTypeError."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) and int(part) % 64 == 0 for part in parts):
        raise argparse.ArgumentTypeError(f"must be KxN with multiples of 64, for example 8192x28672, got {text}")
    return int(parts[0]), int(parts[1])


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """Parse ``"five"``, ``"all"``, a model's name, KxN, or several of these separated by commas.

    Each shape occurs once in the result. Raises argparse's ArgumentTypeError for any other text.
    """
    shapes: list[Shape] = []
    for part in text.split(","):
        if part == "five":
            shapes += FIVE
        elif part == "all":
            shapes += all_shapes()
        elif part in MODELS:
            shapes += model_shapes(part)
        elif part[:1].isdigit():
            shapes.append(parse_shape(part))
        else:
            raise argparse.ArgumentTypeError(f"must be five, all, {', '.join(MODELS)} or KxN, got {part!r}")
    return tuple(dict.fromkeys(shapes))


def parse_m_values(text: str) -> tuple[int, ...]:
    """Parse ``"1,16,64"`` into ascending, distinct values of M, and ``"all"`` into M_VALUES.

    Raises argparse's ArgumentTypeError for any other text.
    """
    if text == "all":
        return M_VALUES
    parts = text.split(",")
    if not all(part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(
            f"must be values of M separated by commas, for example 1,16,64, or all, got {text}"
        )
    return tuple(sorted({int(part) for part in parts}))
