"""Tune on hpcray: a search whose job drains, in its first run; the second run goes on with it."""

import json
import os
import sys
import threading
import time

import ray
from ray import tune

import hpcray

PLACE, TRIALS = sys.argv[1], 12


def train(config):
    with open(os.path.join(PLACE, "begun"), "a") as file:
        file.write(f"{config['x']}\n")
    for step in range(4):
        time.sleep(0.25)
        tune.report({"score": config["x"] * (step + 1)})


def main():
    ray.init(num_cpus=2)
    path = os.path.join(PLACE, "search")
    if tune.Tuner.can_restore(path):
        tuner = tune.Tuner.restore(path, train)
    else:
        tuner = tune.Tuner(
            train,
            param_space={"x": tune.grid_search(list(range(TRIALS)))},
            tune_config=tune.TuneConfig(metric="score", mode="max"),
            run_config=tune.RunConfig(name="search", storage_path=PLACE, verbose=0),
        )

        def drain():
            while not os.path.exists(os.path.join(PLACE, "begun")):
                time.sleep(0.05)
            hpcray.drain("a test", 20)

        threading.Thread(target=drain, daemon=True).start()
    try:
        results = tuner.fit()
        found = {"trials": len(results), "errors": results.num_errors, "best": results.get_best_result().config["x"]}
    except hpcray.exceptions.JobDrainingError as error:
        found = {"drained": str(error)}
    print(json.dumps(found), flush=True)
    if "drained" in found:
        raise SystemExit(0)


if __name__ == "__main__":
    main()
