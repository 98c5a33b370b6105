"""Analysis of files while an instrument writes them.

    hpcray-launch -n 4 examples/gallery/stream/stream.py --directory /scratch/me/run7 --picture spectrum.png

An instrument (here a process that this program starts) writes frames of a detector into a directory, each under its
name when it is complete. The program looks for new names, and submits one task for each: it finds the photons in the
frame and measures their energy. An actor adds the results up and knows the spectrum at any time. No more than a few
frames for each CPU are submitted at once, so that a fast instrument fills the disk rather than the memory.
The directory has to be on a file system that all nodes share.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import hpcray as ray

SIDE, NOISE, LINES = 256, 1.0, (60.0, 85.0)
BINS = np.arange(40, 111, 2.0)


def write_frames(directory: str, frames: int, pause: float) -> None:
    """The instrument. Its photons have one of two energies, and their positions are known from the frame's number."""
    for number in range(frames):
        rng = np.random.default_rng(number)
        frame = rng.normal(0, NOISE, (SIDE, SIDE)).astype(np.float32)
        rows, columns = np.divmod(rng.choice((SIDE // 8) ** 2, photons_of(number), replace=False), SIDE // 8)
        frame[8 * rows + 4, 8 * columns + 4] += rng.choice(LINES, len(rows), p=[0.75, 0.25])
        path = Path(directory, f"frame-{number:06d}.npy")
        np.save(path.with_suffix(".part.npy"), frame)
        os.rename(path.with_suffix(".part.npy"), path)
        time.sleep(pause)
    Path(directory, "end").touch()


def photons_of(number: int) -> int:
    return 20 + number % 30


@ray.remote
def analyse(path: str) -> tuple[int, np.ndarray, float]:
    """The photons of a frame: how many, their spectrum, and the seconds since the frame was complete."""
    frame = np.load(path)
    inner = frame[1:-1, 1:-1]
    around = [frame[1 + i : SIDE - 1 + i, 1 + j : SIDE - 1 + j] for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j]
    energies = inner[(inner > 20 * NOISE) & (inner > np.max(around, axis=0))]
    return len(energies), np.histogram(energies, BINS)[0], time.time() - os.stat(path).st_mtime


@ray.remote
class Spectrum:
    """The sum of all frames so far."""

    def __init__(self) -> None:
        self.frames, self.photons = 0, 0
        self.counts = np.zeros(len(BINS) - 1, int)
        self.delays: list[float] = []

    def add(self, result: tuple[int, np.ndarray, float]) -> None:
        photons, counts, delay = result
        self.frames, self.photons, self.counts = self.frames + 1, self.photons + photons, self.counts + counts
        self.delays.append(delay)

    def now(self) -> tuple[int, int, np.ndarray, list[float]]:
        return self.frames, self.photons, self.counts, self.delays


def draw(counts: np.ndarray, path: str) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    axes.stairs(counts, BINS, fill=True)
    axes.set(xlabel="energy", ylabel="photons")
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1000)
    parser.add_argument("--pause", type=float, default=0.01, help="seconds between two frames")
    parser.add_argument("--directory", default=".", help="shared by all nodes; the frames are removed at the end")
    parser.add_argument("--quick", action="store_true", help="100 frames")
    parser.add_argument("--picture", metavar="FILE", help="draw the spectrum")
    parser.add_argument("--instrument", metavar="DIRECTORY", help="be the instrument (the program starts it so)")
    given = parser.parse_args()
    frames = 100 if given.quick else given.frames
    if given.instrument:
        write_frames(given.instrument, given.frames, given.pause)
        return

    ray.init()
    spectrum = Spectrum.options(num_cpus=0).remote()
    at_once = 4 * int(ray.cluster_resources()["CPU"])
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="frames-", dir=given.directory) as name:
        command = [sys.executable, __file__, "--instrument", name, "--frames", frames, "--pause", given.pause]
        instrument = subprocess.Popen(list(map(str, command)))
        try:
            seen: set[str] = set()
            pending: list[ray.ObjectRef] = []
            ended = False
            while not ended or pending:
                over = Path(name, "end").exists()  # asked before the names: nothing appears between
                fresh = sorted({path.name for path in Path(name).glob("frame-??????.npy")} - seen)
                ended = over and not fresh
                for new in fresh[: at_once - len(pending)]:
                    seen.add(new)
                    pending.append(spectrum.add.remote(analyse.remote(str(Path(name, new).resolve()))))
                done, pending = ray.wait(pending, num_returns=len(pending), timeout=0.01) if pending else ([], [])
                ray.get(done)  # raises what a task has raised
                if not fresh and not pending:
                    assert ended or instrument.poll() in (None, 0), "the instrument has failed"
                    time.sleep(0.01)
        finally:
            instrument.kill()
            instrument.wait()
    seconds = time.perf_counter() - begin
    found, photons, counts, delays = ray.get(spectrum.now.remote())
    planted = sum(map(photons_of, range(frames)))
    delay = 1000 * np.median(delays)
    print(f"{found} frames in {seconds:.1f} s; a result is there {delay:.0f} ms after its frame (median)")
    low, high = counts[BINS[:-1] < 72].sum(), counts[BINS[:-1] >= 72].sum()
    print(f"{photons} photons of {planted}; the lines have {low} and {high}")
    assert found == frames and abs(photons - planted) <= 0.001 * planted
    assert abs(low / photons - 0.75) < 0.05
    if given.picture:
        draw(counts, given.picture)
    print("checked")


if __name__ == "__main__":
    main()
