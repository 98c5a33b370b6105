"""The application of serve_config.yaml."""

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request


@serve.deployment(ray_actor_options={"num_cpus": 0.2})
class Reverser:
    def __init__(self) -> None:
        self.ending = ""

    def reconfigure(self, config: dict) -> None:
        self.ending = config["ending"]

    def reverse(self, text: str) -> str:
        return text[::-1] + self.ending


@serve.deployment(ray_actor_options={"num_cpus": 0.2})
class Ingress:
    def __init__(self, reverser: DeploymentHandle, repeat: int) -> None:
        self.reverser, self.repeat = reverser, repeat

    async def __call__(self, request: Request) -> str:
        return await self.reverser.reverse.remote(request.query_params["text"] * self.repeat)


def build(args: dict) -> serve.Application:
    return Ingress.bind(Reverser.bind(), int(args["repeat"]))


app = build({"repeat": "3"})
