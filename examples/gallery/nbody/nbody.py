"""An ensemble of star clusters that survives preemption and the time limit.

    sbatch -N 4 examples/gallery/nbody/job.sbatch

Each member of the ensemble is an actor that integrates the motion of its stars (leapfrog, softened gravity). When Slurm
announces the end of the job, `__hpcray_checkpoint__` saves positions, velocities and step; the job goes back into the
queue, and in its next run `__hpcray_restore__` continues. An ensemble that was interrupted, however often, ends with
exactly the numbers of one that was not: the program computes one member again, alone, and compares every bit.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np

import hpcray as ray

STEP, SOFTENING = 0.002, 0.05


class Stars:
    """A cluster of stars, at first in a random ball at rest. G = 1, and all masses together are 1."""

    def __init__(self, seed: int, count: int) -> None:
        rng = np.random.default_rng(seed)
        self.positions = rng.normal(size=(count, 3))
        self.velocities = rng.normal(scale=0.3, size=(count, 3))
        self.velocities -= self.velocities.mean(axis=0)
        self.steps = 0

    def pull(self) -> np.ndarray:
        """The acceleration of each star."""
        apart = self.positions[None] - self.positions[:, None]
        inverse = ((apart**2).sum(axis=2) + SOFTENING**2) ** -1.5
        return (apart * inverse[:, :, None]).sum(axis=1) / len(self.positions)

    def energy(self) -> float:
        apart = self.positions[None] - self.positions[:, None]
        distance = np.sqrt((apart**2).sum(axis=2) + SOFTENING**2)
        count = len(self.positions)
        potential = -(np.triu(1 / distance, 1).sum()) / count**2
        return float(0.5 * (self.velocities**2).sum() / count + potential)

    def advance(self, steps: int) -> tuple[int, float]:
        """Integrate over some steps. The steps so far, and the radius that holds half of the stars."""
        for _ in range(steps):
            self.velocities = self.velocities + 0.5 * STEP * self.pull()
            self.positions = self.positions + STEP * self.velocities
            self.velocities = self.velocities + 0.5 * STEP * self.pull()
            self.steps += 1
        return self.steps, float(np.median(np.linalg.norm(self.positions - self.positions.mean(axis=0), axis=1)))

    def state(self) -> tuple[np.ndarray, np.ndarray, float]:
        return self.positions, self.velocities, self.energy()


@ray.remote
class Member(Stars):
    """A cluster as an actor, with what its checkpoint holds."""

    def __init__(self, seed: int, count: int) -> None:
        super().__init__(seed, count)
        self.radii: list[float] = []

    def advance(self, steps: int) -> tuple[int, list[float]]:
        done, radius = super().advance(steps)
        self.radii.append(radius)
        return done, self.radii

    def progress(self) -> tuple[int, list[float]]:
        return self.steps, self.radii

    def __hpcray_checkpoint__(self, directory: str) -> None:
        state = {"positions": self.positions, "velocities": self.velocities, "radii": np.array(self.radii)}
        np.savez(Path(directory, "stars.npz"), steps=self.steps, **state)

    def __hpcray_restore__(self, directory: str) -> None:
        with np.load(Path(directory, "stars.npz")) as saved:
            self.positions, self.velocities = saved["positions"], saved["velocities"]
            self.steps, self.radii = int(saved["steps"]), saved["radii"].tolist()


def draw(radii: list[list[float]], chunk: int, path: str) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    times = STEP * chunk * (1 + np.arange(len(radii[0])))
    for member in radii:
        axes.plot(times, member, color="C0", alpha=0.4, lw=0.8)
    axes.plot(times, np.median(radii, axis=0), color="k", label="median of the ensemble")
    axes.set(xlabel="time", ylabel="half-mass radius")
    axes.legend()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=16)
    parser.add_argument("--stars", type=int, default=128)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--chunk", type=int, default=20, help="steps of one call")
    parser.add_argument("--quick", action="store_true", help="4 members of 32 stars, 1,000 steps")
    parser.add_argument("--picture", metavar="FILE", help="draw the half-mass radii")
    given = parser.parse_args()
    if given.quick:
        given.members, given.stars, given.steps = 4, 32, 1000

    ray.init()
    begin = time.perf_counter()
    members = [Member.options(name=f"member-{seed}").remote(seed, given.stars) for seed in range(given.members)]
    radii: list[list[float]] = [[] for _ in members]
    calls = {member.progress.remote(): seed for seed, member in enumerate(members)}
    first = ray.get(list(calls))
    print(
        f"run {os.environ.get('SLURM_RESTART_COUNT', '0')} begins at steps {[steps for steps, _ in first]}", flush=True
    )
    while calls:
        # When the job drains, this raises JobDrainingError: the program ends with the exit code for unfinished work.
        (ready,), _ = ray.wait(list(calls))
        seed = calls.pop(ready)
        done, radii[seed] = ray.get(ready)
        if done < given.steps:
            calls[members[seed].advance.remote(min(given.chunk, given.steps - done))] = seed
    positions, velocities, energy = ray.get(members[0].state.remote())
    seconds = time.perf_counter() - begin
    alone = Stars(0, given.stars)
    before = alone.energy()
    alone.advance(given.steps)
    print(f"{given.members} members, {given.steps} steps: {seconds:.1f} s in this run")
    print(f"energy of a member: {before:.6f} at first, {energy:.6f} at last")
    assert (positions == alone.positions).all() and (velocities == alone.velocities).all(), "interruptions are visible"
    assert abs(energy - before) < 0.01 * abs(before)
    if given.picture:
        draw(radii, given.chunk, given.picture)
    print("checked")


if __name__ == "__main__":
    main()
