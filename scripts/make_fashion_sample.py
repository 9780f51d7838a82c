"""Make `cnmm/data/fashion_sample.npz` from the IDX files of Fashion-MNIST.

    python scripts/make_fashion_sample.py /usr/share/datasets/fashion-mnist

(That folder is where Debian's package dataset-fashion-mnist puts them.) 600 training and 100 test images of each class,
chosen at random with seed 0 and kept in the order of the original files. A second run writes the same bytes.
"""

import argparse
import gzip
import struct
import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

NUM_CLASSES = 10
NUM_PER_CLASS = {"train": 600, "test": 100}
IDX_PREFIX = {"train": "train", "test": "t10k"}
OUTPUT = Path(__file__).resolve().parent.parent / "cnmm" / "data" / "fashion_sample.npz"


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """One gzipped IDX file of bytes: 0, 0, type 8, number of axes, the sizes as big-endian uint32, the data."""
    raw = gzip.decompress(path.read_bytes())
    zero, kind, num_axes = struct.unpack_from(">HBB", raw)
    if (zero, kind) != (0, 8):
        raise ValueError(f"{path} is not an IDX file of unsigned bytes: it begins with {raw[:4].hex()}, not 000008..")
    shape = struct.unpack_from(f">{num_axes}I", raw, 4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * num_axes).reshape(shape)


def choose(labels: npt.NDArray[np.uint8], num_per_class: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Sorted indices of `num_per_class` images of each class."""
    chosen = [
        rng.choice(np.flatnonzero(labels == label), num_per_class, replace=False, shuffle=False)
        for label in range(NUM_CLASSES)
    ]
    return np.sort(np.concatenate(chosen))


def make_sample(folder: Path) -> dict[str, npt.NDArray[np.uint8]]:
    """The four arrays of the sample."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split, prefix in IDX_PREFIX.items():
        images = read_idx(folder / f"{prefix}-images-idx3-ubyte.gz")
        labels = read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz")
        indices = choose(labels, NUM_PER_CLASS[split], rng)
        arrays[f"{split}_images"] = images[indices]
        arrays[f"{split}_labels"] = labels[indices]
    return arrays


def write_npz(path: Path, arrays: dict[str, npt.NDArray[np.uint8]]) -> None:
    """Like `np.savez_compressed`, but its promise is explicit: fixed dates, so equal arrays give equal bytes."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            member = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            member.compress_type = zipfile.ZIP_DEFLATED
            member.create_system = 3
            member.external_attr = 0o644 << 16
            with archive.open(member, "w") as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def main(argv: list[str] | None = None) -> None:
    """Read the folder given on the command line and write the sample."""
    parser = argparse.ArgumentParser(description="Make the embedded sample of Fashion-MNIST.")
    parser.add_argument("folder", type=Path, help="folder with the four *-ubyte.gz files")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="file to write (default: %(default)s)")
    args = parser.parse_args(argv)
    write_npz(args.output, make_sample(args.folder))
    print(f"{args.output}: {args.output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
