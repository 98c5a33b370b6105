"""Ray Serve on hpcray: an application of two deployments behind HTTP, and a client of it.

    export HPCRAY_RAY_LIBRARIES=/some/where       # an unpacked wheel of Ray, see docs/how-to/train-and-serve.md
    hpcray-launch -n 2 --as-ray examples/serve_app.py --requests 200

A batch job is client and server at once: the program starts the application, sends it requests over HTTP on the node
it runs on, and through a handle, and shuts it down. With `--forever` it serves until the job ends, for clients of the
same user on the nodes of the job: `curl 'http://127.0.0.1:8000/sentiment?text=what+a+good+day'`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import time
import urllib.parse
import urllib.request

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request

GOOD, BAD = {"good", "great", "fine", "nice"}, {"bad", "poor", "awful", "sad"}


@serve.deployment(num_replicas=2, max_ongoing_requests=64)
class Scorer:
    """Scores texts, up to 16 at once. A model would be loaded by `__init__`."""

    @serve.batch(max_batch_size=16, batch_wait_timeout_s=0.005)
    async def score(self, texts: list[str]) -> list[int]:
        words = [text.lower().split() for text in texts]
        return [sum(word in GOOD for word in each) - sum(word in BAD for word in each) for each in words]


@serve.deployment(max_ongoing_requests=100)
class Sentiment:
    """Answers requests, over HTTP and from other processes of the job."""

    def __init__(self, scorer: DeploymentHandle) -> None:
        self.scorer = scorer

    async def __call__(self, request: Request) -> dict[str, object]:
        return await self.judge(request.query_params["text"])

    async def judge(self, text: str) -> dict[str, object]:
        score = await self.scorer.score.remote(text)
        return {"text": text, "mood": "good" if score > 0 else "bad" if score < 0 else "none"}


app = Sentiment.bind(Scorer.bind())


def ask(port: int, text: str) -> dict[str, object]:
    """One request over HTTP."""
    query = urllib.parse.urlencode({"text": text})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/sentiment?{query}", timeout=30) as answer:
        found: dict[str, object] = json.load(answer)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--forever", action="store_true", help="serve until the job ends")
    given = parser.parse_args()
    ray.init()
    serve.start(http_options={"port": given.port})
    handle = serve.run(app, name="sentiment", route_prefix="/sentiment")
    print(f"http://127.0.0.1:{given.port}/sentiment on every node of the job", flush=True)
    if given.forever:
        while True:
            time.sleep(3600)
    texts = [f"day {number} was {'good' if number % 3 else 'awful'}" for number in range(given.requests)]
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        over_http = list(pool.map(lambda text: ask(given.port, text), texts))
    seconds = time.perf_counter() - start
    by_handle = [response.result() for response in [handle.judge.remote(text) for text in texts]]
    if over_http != by_handle:
        raise SystemExit("HTTP and the handle disagree")
    good = sum(answer["mood"] == "good" for answer in over_http)
    print(f"{len(over_http)} requests, {good} good, {len(over_http) / seconds:.0f} requests/s over HTTP")
    serve.shutdown()


if __name__ == "__main__":
    main()
