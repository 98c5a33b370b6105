"""RLlib, lent from Ray's wheel: algorithms, environments, evaluation, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")
gymnasium = pytest.importorskip("gymnasium")
for needed in ("torch", "tree", "lz4", "scipy", "pandas", "pyarrow"):
    pytest.importorskip(needed)


pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Corridor(gymnasium.Env):  # type: ignore[misc,name-defined]
    """The end is at the right; each step costs 0.1."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.length = config["length"]
        self.place = 0
        self.observation_space = gymnasium.spaces.Box(0.0, float(self.length), (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.place = 0
        return np.array([0.0], np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place = max(0, self.place + (1 if action == 1 else -1))
        ended = self.place >= self.length
        return np.array([self.place], np.float32), 1.0 if ended else -0.1, ended, False, {}


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


def test_ppo_learns_and_is_evaluated(ppo: Any) -> None:
    config = ppo.evaluation(evaluation_interval=2, evaluation_duration=3, evaluation_num_env_runners=1)
    algorithm = config.build_algo()
    try:
        returns = []
        for iteration in range(1, 5):
            result = algorithm.train()
            assert result["training_iteration"] == iteration
            returns.append(result["env_runners"]["episode_return_mean"])
            assert ("evaluation" in result) is (iteration > 1), "later iterations show what the last evaluation found"
        assert result["num_env_steps_sampled_lifetime"] >= 4 * 512
        assert result["evaluation"]["env_runners"]["num_episodes"] >= 3
        assert max(returns[1:]) > returns[0], returns
    finally:
        algorithm.stop()


def test_a_checkpoint_restores_an_algorithm(ppo: Any, tmp_path: Path) -> None:
    from ray.rllib.algorithms.algorithm import Algorithm

    def weights(algorithm: Any) -> dict[str, Any]:
        return {name: np.asarray(value) for name, value in algorithm.get_module().get_state().items()}

    algorithm = ppo.env_runners(num_env_runners=1).build_algo()
    try:
        algorithm.train()
        before = weights(algorithm)
        path = algorithm.save_to_path(str(tmp_path / "checkpoint"))
    finally:
        algorithm.stop()
    restored = Algorithm.from_checkpoint(path)
    try:
        after = weights(restored)
        assert before.keys() == after.keys()
        assert all(np.array_equal(before[name], after[name]) for name in before)
        assert restored.train()["training_iteration"] == 2
    finally:
        restored.stop()


def test_an_environment_of_ones_own(ray: Any) -> None:
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.tune.registry import register_env

    register_env("corridor", Corridor)
    config = (
        PPOConfig()
        .environment("corridor", env_config={"length": 4})
        .env_runners(num_env_runners=1)
        .training(train_batch_size_per_learner=256, minibatch_size=128, num_epochs=4, lr=1e-2)
        .debugging(seed=1)
    )
    algorithm = config.build_algo()
    try:
        best = max(algorithm.train()["env_runners"]["episode_return_mean"] for _ in range(6))
        assert best > 0.3, "straight on it is 0.7; by chance it is below 0"
    finally:
        algorithm.stop()


def test_dqn(ray: Any) -> None:
    from ray.rllib.algorithms.dqn import DQNConfig

    config = (
        DQNConfig()
        .environment(Corridor, env_config={"length": 3})
        .env_runners(num_env_runners=1)
        .training(
            train_batch_size=32,
            num_steps_sampled_before_learning_starts=200,
            replay_buffer_config={"type": "PrioritizedEpisodeReplayBuffer", "capacity": 5000},
        )
        .debugging(seed=1)
    )
    algorithm = config.build_algo()
    try:
        for _ in range(2):
            result = algorithm.train()
        assert result["num_env_steps_sampled_lifetime"] >= 2000
        assert result["learners"]["default_policy"]["num_module_steps_trained_lifetime"] > 0
    finally:
        algorithm.stop()


def test_tune_tries_settings_of_an_algorithm(ray: Any, ppo: Any, tmp_path: Path) -> None:
    from ray import tune

    config = ppo.env_runners(num_env_runners=1).training(lr=tune.grid_search([1e-3, 1e-4]))
    results = tune.Tuner(
        "PPO",
        param_space=config,
        run_config=tune.RunConfig(
            storage_path=str(tmp_path),
            stop={"training_iteration": 2},
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
            verbose=0,
        ),
    ).fit()
    assert (len(results), results.num_errors) == (2, 0), results.errors
    for result in results:
        assert result.metrics["training_iteration"] == 2
        assert Path(result.checkpoint.path).exists()


def test_agents_with_policies_of_their_own(ray: Any) -> None:
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.env.multi_agent_env import MultiAgentEnv

    class Pair(MultiAgentEnv):  # type: ignore[misc]
        """Two agents: one is paid for saying 1, the other for saying 0. An episode has ten turns."""

        def __init__(self, config: Any = None) -> None:
            super().__init__()
            self.agents = self.possible_agents = ["one", "zero"]
            self.observation_spaces = dict.fromkeys(self.agents, gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32))
            self.action_spaces = dict.fromkeys(self.agents, gymnasium.spaces.Discrete(2))

        def _seen(self) -> dict[str, Any]:
            return {agent: np.zeros(1, np.float32) for agent in self.agents}

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            self.turn = 0
            return self._seen(), {}

        def step(self, actions: dict[str, int]) -> Any:
            self.turn += 1
            paid = {"one": float(actions["one"] == 1), "zero": float(actions["zero"] == 0)}
            return self._seen(), paid, {"__all__": self.turn == 10}, {"__all__": False}, {}

    algorithm = (
        PPOConfig()
        .environment(Pair)
        .multi_agent(policies={"one", "zero"}, policy_mapping_fn=lambda agent, episode, **more: agent)
        .env_runners(num_env_runners=1)
        .training(train_batch_size_per_learner=400, minibatch_size=100, num_epochs=6, lr=5e-3)
        .debugging(seed=1)
        .build_algo()
    )
    try:
        for _ in range(5):
            result = algorithm.train()
        returns = result["env_runners"]["agent_episode_returns_mean"]
        assert set(returns) == {"one", "zero"}
        assert min(returns.values()) > 7, "by chance it is 5"
        assert set(result["learners"]) >= {"one", "zero"}
        assert algorithm.get_module("one") is not algorithm.get_module("zero")
    finally:
        algorithm.stop()


def test_sac_learns_continuous_actions(ray: Any) -> None:
    from ray.rllib.algorithms.sac import SACConfig

    algorithm = (
        SACConfig()
        .environment("Pendulum-v1")
        .env_runners(num_env_runners=1, rollout_fragment_length=1)
        .training(train_batch_size_per_learner=64, num_steps_sampled_before_learning_starts=100)
        .reporting(min_sample_timesteps_per_iteration=200, min_time_s_per_iteration=0)
        .debugging(seed=1)
        .build_algo()
    )
    try:
        result = algorithm.train()
        learned = result["learners"]["default_policy"]
        assert result["num_env_steps_sampled_lifetime"] >= 200
        assert learned["num_module_steps_trained_lifetime"] >= 64
        assert np.isfinite(learned["qf_loss"]) and np.isfinite(learned["policy_loss"])
    finally:
        algorithm.stop()
