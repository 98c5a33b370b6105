"""Monte-Carlo with MPI: the Ising magnet at many temperatures, each on MPI ranks of its own.

    hpcray-launch -n 4 examples/gallery/ising/ising.py --picture magnet.png

For each temperature a task calls `ray.mpi.run`. Its ranks divide the lattice into stripes; after every half-sweep the
neighbours exchange their borders with `comm.Sendrecv`, as in any MPI program. Several temperatures run side by side.
The magnetization is compared with Onsager's exact solution.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

import hpcray as ray

CRITICAL = 2 / np.log(1 + np.sqrt(2))


def simulate(comm: Any, temperature: float, size: int, sweeps: int) -> float:
    """The mean magnetization of a spin after the first half of the sweeps. Runs on every rank."""
    rows = size // comm.size
    up, down = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    rng = np.random.default_rng([comm.rank, round(temperature * 1000)])
    spins = np.ones((rows + 2, size), np.int8)  # with the neighbours' borders
    row, column = np.indices((rows, size))
    colours = [(row + column + comm.rank * rows) % 2 == colour for colour in (0, 1)]
    measured = []
    for sweep in range(sweeps):
        for colour in colours:
            comm.Sendrecv(spins[1].copy(), dest=up, recvbuf=spins[rows + 1], source=down)
            comm.Sendrecv(spins[rows].copy(), dest=down, recvbuf=spins[0], source=up)
            inner = spins[1:-1]
            around = spins[:-2] + spins[2:] + np.roll(inner, 1, axis=1) + np.roll(inner, -1, axis=1)
            accepted = rng.random((rows, size)) < np.exp(-2.0 * inner * around / temperature)
            inner[colour & accepted] *= -1
        if sweep >= sweeps // 2:
            measured.append(comm.allreduce(int(spins[1:-1].sum())))
    return abs(float(np.mean(measured))) / size**2


def exact(temperature: float) -> float:
    return float(max(0.0, 1 - np.sinh(2 / temperature) ** -4) ** 0.125) if temperature < CRITICAL else 0.0


@ray.remote
def magnetization(temperature: float, ranks: int, size: int, sweeps: int) -> float:
    return ray.mpi.run(simulate, ranks=ranks, args=(temperature, size, sweeps))[0]


def draw(temperatures: list[float], found: list[float], path: str) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    line = np.linspace(temperatures[0], temperatures[-1], 400)
    axes.plot(line, [exact(each) for each in line], color="0.6", label="exact, infinite lattice")
    axes.plot(temperatures, found, "o", label="simulated")
    axes.set(xlabel="temperature", ylabel="magnetization of a spin")
    axes.legend()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="for each temperature")
    parser.add_argument("--quick", action="store_true", help="three temperatures, a small lattice")
    parser.add_argument("--picture", metavar="FILE", help="draw the magnetization")
    given = parser.parse_args()
    temperatures = [1.6, 2.0, 3.2] if given.quick else [round(1.5 + 0.1 * step, 1) for step in range(18)]
    size, sweeps = (64, 400) if given.quick else (128, 2000)

    ray.init()
    begin = time.perf_counter()
    found = ray.get([magnetization.remote(each, given.ranks, size, sweeps) for each in temperatures])
    seconds = time.perf_counter() - begin
    for temperature, value in zip(temperatures, found, strict=True):
        print(f"T = {temperature:.1f}: magnetization {value:.3f}, exact {exact(temperature):.3f}")
    far = [each for each in zip(temperatures, found, strict=True) if abs(each[0] - CRITICAL) > 0.25]
    assert all(abs(value - exact(temperature)) < 0.06 for temperature, value in far)
    print(f"{len(temperatures)} temperatures on {given.ranks} ranks each, {seconds:.1f} s")
    if given.picture:
        draw(temperatures, found, given.picture)
    print("checked")


if __name__ == "__main__":
    main()
