"""RLlib, lent from Ray's wheel: offline data, lost env runners, several learners, state, asynchronous learning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")
for needed in ("gymnasium", "torch", "tree", "lz4", "scipy", "pandas", "pyarrow"):
    pytest.importorskip(needed)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def ppo(ray: Any) -> Any:
    """A small PPO for CartPole, as a config."""
    from ray.rllib.algorithms.ppo import PPOConfig

    return (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=2)
        .training(train_batch_size_per_learner=512, minibatch_size=256, num_epochs=4, lr=1e-3)
        .debugging(seed=1)
    )


def test_behavior_is_cloned_from_episodes_on_disk(ppo: Any, tmp_path: Path) -> None:
    import ray.data
    from ray.rllib.algorithms.bc import BCConfig
    from ray.rllib.core.columns import Columns

    pytest.importorskip("msgpack_numpy")
    path = str(tmp_path / "episodes")
    recording = ppo.env_runners(num_env_runners=1, batch_mode="complete_episodes").offline_data(
        output=path, output_write_episodes=True, output_max_rows_per_file=20, output_write_remaining_data=True,
        output_compress_columns=[Columns.OBS],
    )  # fmt: skip
    recorder = recording.build_algo()
    try:
        for _ in range(2):
            recorder.train()
    finally:
        recorder.stop()
    assert ray.data.read_parquet(path).count() > 20
    algorithm = (
        BCConfig()
        .environment("CartPole-v1")
        .offline_data(
            input_=[path],
            input_read_episodes=True,
            input_compress_columns=[Columns.OBS],
            dataset_num_iters_per_learner=1,
        )
        .training(train_batch_size_per_learner=256, lr=1e-3)
        .evaluation(evaluation_interval=2, evaluation_num_env_runners=1, evaluation_duration=2)
        .debugging(seed=1)
        .build_algo()
    )
    try:
        for _ in range(2):
            result = algorithm.train()
        assert result["learners"]["default_policy"]["num_module_steps_trained_lifetime"] >= 2 * 256
        assert result["evaluation"]["env_runners"]["num_episodes"] == 2
    finally:
        algorithm.stop()


def test_an_env_runner_that_dies_is_replaced(ray: Any, ppo: Any, tmp_path: Path) -> None:
    from ray.rllib.callbacks.callbacks import RLlibCallback

    class Restarts(RLlibCallback):  # type: ignore[misc]
        def on_env_runners_recreated(self, *, algorithm: Any, env_runner_indices: Any, **more: Any) -> None:
            with open(tmp_path / "recreated", "a") as file:
                file.write(f"{env_runner_indices}\n")

    algorithm = (
        ppo.fault_tolerance(restart_failed_env_runners=True, delay_between_env_runner_restarts_s=0.0)
        .callbacks(Restarts)
        .build_algo()
    )
    try:
        algorithm.train()
        victim = algorithm.env_runner_group._worker_manager.actors()[1]
        ray.kill(victim, no_restart=False)
        for _ in range(10):
            result = algorithm.train()
            if algorithm.env_runner_group.num_healthy_remote_workers() == 2 and (tmp_path / "recreated").exists():
                break
        assert algorithm.env_runner_group.num_healthy_remote_workers() == 2
        assert (tmp_path / "recreated").read_text().startswith("[1]")
        assert result["num_env_steps_sampled_lifetime"] >= 512
    finally:
        algorithm.stop()


def test_learners_in_processes_of_their_own_agree(ray: Any, ppo: Any) -> None:
    algorithm = ppo.env_runners(num_env_runners=1).learners(num_learners=2, num_gpus_per_learner=0).build_algo()
    try:
        result = algorithm.train()
        assert result["learners"]["default_policy"]["num_module_steps_trained"] > 0

        def weights(learner: Any) -> Any:
            state = learner.module["default_policy"].unwrapped().get_state()
            return {name: np.asarray(value) for name, value in state.items()}

        first, second = [found.get() for found in algorithm.learner_group.foreach_learner(weights)]
        assert first.keys() == second.keys()
        assert all(np.allclose(first[name], second[name]) for name in first), "gradients were averaged"
    finally:
        algorithm.stop()


def test_the_state_of_an_algorithm_goes_to_another_one(ppo: Any, tmp_path: Path) -> None:
    import torch
    from ray.rllib.core.columns import Columns
    from ray.rllib.core.rl_module.rl_module import RLModule

    first = ppo.env_runners(num_env_runners=1).build_algo()
    try:
        first.train()
        path = first.save_to_path(str(tmp_path / "state"))
        seen = {Columns.OBS: torch.ones(1, 4)}
        wanted = first.get_module().forward_inference(seen)[Columns.ACTION_DIST_INPUTS]
    finally:
        first.stop()
    module = RLModule.from_checkpoint(Path(path) / "learner_group" / "learner" / "rl_module" / "default_policy")
    assert torch.allclose(module.forward_inference(seen)[Columns.ACTION_DIST_INPUTS], wanted)
    second = ppo.build_algo()
    try:
        second.restore_from_path(path)
        found = second.env_runner_group.foreach_env_runner(
            lambda runner: runner.module.forward_inference(seen)[Columns.ACTION_DIST_INPUTS].detach().numpy(),
            local_env_runner=False,
        )
        assert len(found) >= 1
        assert all(np.allclose(one, wanted.detach().numpy()) for one in found)
        assert second.iteration == 1
    finally:
        second.stop()


def test_impala_learns_from_samples_that_come_meanwhile(ray: Any) -> None:
    from ray.rllib.algorithms.impala import IMPALAConfig

    algorithm = (
        IMPALAConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=2, rollout_fragment_length=50)
        .learners(num_learners=0, num_aggregator_actors_per_learner=0)
        .training(train_batch_size_per_learner=200)
        .reporting(min_time_s_per_iteration=1)
        .debugging(seed=1)
        .build_algo()
    )
    try:
        for _ in range(60):  # an iteration takes what has come by its end, which may be nothing
            result = algorithm.train()
            if result.get("learners", {}).get("default_policy", {}).get("num_module_steps_trained_lifetime", 0) >= 200:
                break
        assert result["learners"]["default_policy"]["num_module_steps_trained_lifetime"] >= 200
        assert result["num_env_steps_sampled_lifetime"] >= 200
    finally:
        algorithm.stop()
