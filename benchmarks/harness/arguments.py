"""Values on the command line, common to the benchmarks."""

import argparse
import re


def size_argument(text: str) -> int:
    """ "2G", "512M", "65536" as bytes (powers of 1024)."""
    found = re.fullmatch(r"(\d+)([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if found is None or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: give 512M or 2G")
    return int(found[1]) << 10 * " KMGT".index(found[2].upper() or " ")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value
