"""The command line of Serve: build, run, deploy, status, config, shutdown; an application of a YAML file."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ray
import requests
import yaml
from click.testing import CliRunner
from ray.serve import start
from ray.serve.scripts import cli

HERE = Path(__file__).parent
SERVE = [sys.executable, "-m", "ray.serve.scripts"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(condition, seconds: float = 120) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.2)
    return False


def answer(port: int, path: str, **params) -> str:
    try:
        response = requests.get(f"http://127.0.0.1:{port}{path}", params=params, timeout=60)
    except (requests.ConnectionError, requests.Timeout):
        return "nothing"
    return response.text if response.status_code == 200 else f"{response.status_code}"


def config(port: int, *applications: dict) -> dict:
    return {
        "proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": port},
        "applications": list(applications),
    }  # fmt: skip


def application(ending: str, repeat: int) -> dict:
    return {
        "name": "text", "route_prefix": "/text", "import_path": "serve_text:build", "args": {"repeat": repeat},
        "deployments": [{"name": "Reverser", "num_replicas": 2, "user_config": {"ending": ending}}],
    }  # fmt: skip


def main():
    found, port = {}, free_port()
    directory = tempfile.TemporaryDirectory()
    file = Path(directory.name) / "config.yaml"
    # Replicas import the application too.
    os.environ["PYTHONPATH"] = f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"

    sys.path.insert(0, str(HERE))

    def serve(*words: str) -> str:
        done = CliRunner().invoke(cli, words, catch_exceptions=False)
        assert done.exit_code == 0, f"{words}: {done.output}"
        return done.stdout

    serve("build", "serve_text:app", "-o", str(file), "--app-dir", str(HERE))
    built = yaml.safe_load(file.read_text())["applications"]
    found["built"] = [(app["name"], app["import_path"], [d["name"] for d in app["deployments"]]) for app in built]

    context = ray.init(num_cpus=6, namespace="cli")
    url = context.dashboard_url
    where = ("-a", f"http://{url}") if url else ()
    found["before"] = yaml.safe_load(serve("status", *where))
    file.write_text(yaml.safe_dump(config(port, application("!", 2))))
    serve("deploy", *where, str(file))

    def states() -> dict:
        status = yaml.safe_load(serve("status", *where))
        return {name: app["status"] for name, app in status["applications"].items()}

    found["deployed"] = until(lambda: states() == {"text": "RUNNING"}), answer(port, "/text", text="abc")
    status = yaml.safe_load(serve("status", *where, "-n", "text"))
    found["replicas"] = {name: one["replica_states"] for name, one in status["deployments"].items()}
    found["config"] = yaml.safe_load(serve("config", *where)) == application("!", 2)

    other = {"name": "other", "route_prefix": "/other", "import_path": "serve_text:app"}
    file.write_text(yaml.safe_dump(config(port, application("?", 1), other)))
    serve("deploy", *where, str(file))
    found["changed"] = (
        until(lambda: answer(port, "/text", text="abc") == "cba?"),
        until(lambda: answer(port, "/other", text="abc") == "abcabcabc"),
    )
    broken = {"name": "broken", "route_prefix": "/broken", "import_path": "serve_text:missing"}
    file.write_text(yaml.safe_dump(config(port, application("?", 1), broken)))
    serve("deploy", *where, str(file))
    found["broken"] = until(lambda: states() == {"text": "RUNNING", "broken": "DEPLOY_FAILED"})
    status = yaml.safe_load(serve("status", *where, "-n", "broken"))
    found["why"] = "missing" in status["message"]
    serve("shutdown", "-y", *where)
    found["after"] = until(lambda: answer(port, "/text", text="abc") == "nothing"), states()
    start(http_options={"port": port}, proxy_location="HeadOnly")
    path = ("serve_text:build", "repeat=2", "--app-dir", str(HERE), "--route-prefix", "/mine", "--name", "mine")
    serve("run", *path, "--non-blocking")
    found["a path"] = answer(port, "/mine", text="ab")
    serve("shutdown", "-y", *where)
    ray.shutdown()

    # A job of its own, that Ctrl-C ends.
    file.write_text(yaml.safe_dump(config(port, application(".", 3))))
    with subprocess.Popen([*SERVE, "run", "--address", "local", str(file)], stdout=subprocess.DEVNULL) as process:
        found["run"] = until(lambda: answer(port, "/text", text="ab") == "bababa.")
        process.send_signal(signal.SIGINT)
        found["interrupted"] = process.wait(60)
    found["closed"] = until(lambda: answer(port, "/text", text="ab") == "nothing")
    blocking = f"""
import ray, serve_text
from ray import serve
ray.init("local", num_cpus=4)
serve.start(http_options={{"port": {port}}})
serve.run(serve_text.app, blocking=True)
"""
    with subprocess.Popen([sys.executable, "-c", blocking], stderr=subprocess.DEVNULL) as process:
        found["blocking"] = until(lambda: answer(port, "/", text="ab") == "bababa")
        process.send_signal(signal.SIGINT)
        found["interrupt"] = process.wait(60)
    found["end"] = until(lambda: answer(port, "/", text="ab") == "nothing")
    directory.cleanup()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
