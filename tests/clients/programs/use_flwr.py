"""Flower: the clients of a simulated federation are actors of Ray; federated averaging finds the mean of theirs."""

import json
import os

import numpy as np
import ray
from flwr.client import ClientApp, NumPyClient
from flwr.common import Context, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation


class Client(NumPyClient):
    """Moves half the way to its own number, of as many examples."""

    def __init__(self, number):
        self.number = number

    def fit(self, parameters, config):
        return [parameters[0] + 0.5 * (self.number - parameters[0])], self.number, {"pid": os.getpid()}

    def evaluate(self, parameters, config):
        return float(abs(parameters[0][0] - self.number)), self.number, {}


found = []
pids = set()


def server(context: Context):
    class Kept(FedAvg):
        def aggregate_fit(self, server_round, results, failures):
            parameters, metrics = super().aggregate_fit(server_round, results, failures)
            found.append(float(parameters_to_ndarrays(parameters)[0][0]))
            pids.update(result.metrics["pid"] for _, result in results)
            return parameters, metrics

    strategy = Kept(initial_parameters=ndarrays_to_parameters([np.zeros(1)]), min_available_clients=4)
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=3))


if __name__ == "__main__":
    run_simulation(
        server_app=ServerApp(server_fn=server),
        client_app=ClientApp(
            client_fn=lambda context: Client(int(context.node_config["partition-id"]) + 1).to_client()
        ),
        num_supernodes=4,
        backend_config={"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 2}},
    )
    # The mean of 1 to 4, each with as many examples as it says, is 3; the rounds halve what is left to it.
    print(json.dumps({"ray": ray.__file__, "found": found, "pids": len(pids - {os.getpid()})}))
