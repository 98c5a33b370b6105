"""Serve over gRPC: unary calls and streams both ways, metadata, codes, errors, several applications, health."""

import json
import socket

import grpc
import ray
from ray import serve
from ray.serve.config import gRPCOptions
from ray.serve.generated import serve_pb2, serve_pb2_grpc
from ray.serve.grpc_util import RayServegRPCContext, gRPCInputStream

ADD = "ray.serve.generated.serve_pb2_grpc"


@serve.deployment
class Greeter:
    def __call__(self, message: serve_pb2.UserDefinedMessage) -> serve_pb2.UserDefinedResponse:
        return serve_pb2.UserDefinedResponse(
            greeting=f"Hello {message.name} from {message.foo}", num_x2=message.num * 2
        )

    async def Method1(self, message, grpc_context: RayServegRPCContext):
        if message.name == "":
            grpc_context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
            grpc_context.set_details("who?")
            grpc_context.set_trailing_metadata([("missing", "name")])
            raise ValueError("no name")
        if message.name == "fail":
            raise RuntimeError("as asked")
        grpc_context.set_trailing_metadata([("seen", message.name)])
        return serve_pb2.UserDefinedResponse(greeting=f"method 1: {message.name}")

    @serve.multiplexed(max_num_models_per_replica=1)
    async def model(self, name: str) -> str:
        return f"model {name}"

    async def Method2(self, message):
        return serve_pb2.UserDefinedResponse2(greeting=await self.model(serve.get_multiplexed_model_id()))

    def Streaming(self, message):
        for number in range(message.num):
            yield serve_pb2.UserDefinedResponse(greeting=f"{number}: {message.name}", num_x2=number)

    async def ClientStreaming(self, stream: gRPCInputStream):
        names = [message.name async for message in stream]
        return serve_pb2.UserDefinedResponse(greeting=" ".join(names), num_x2=len(names))

    async def BidiStreaming(self, stream: gRPCInputStream):
        async for message in stream:
            yield serve_pb2.UserDefinedResponse(greeting=message.name[::-1])


@serve.deployment
class Stand:
    async def FruitStand(self, fruits) -> serve_pb2.FruitCosts:
        return serve_pb2.FruitCosts(costs=2.0 * fruits.orange + 3.0 * fruits.apple)


def main():
    ray.init(num_cpus=6)
    with socket.socket() as probe, socket.socket() as another:
        probe.bind(("127.0.0.1", 0))
        another.bind(("127.0.0.1", 0))
        port, http = probe.getsockname()[1], another.getsockname()[1]
    functions = [f"{ADD}.add_UserDefinedServiceServicer_to_server", f"{ADD}.add_FruitServiceServicer_to_server"]
    serve.start(http_options={"port": http}, grpc_options=gRPCOptions(port=port, grpc_servicer_functions=functions))
    serve.run(Greeter.bind(), name="greeter", route_prefix="/greeter")
    serve.run(Stand.bind(), name="stand", route_prefix="/stand")
    found, to = {}, (("application", "greeter"),)

    def failed(call) -> list:
        try:
            call()
        except grpc.RpcError as error:
            missing = [value for key, value in error.trailing_metadata() if key == "missing"]
            return [error.code().name, error.details().strip().splitlines()[-1][-40:], missing]
        return []

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        api = serve_pb2_grpc.RayServeAPIServiceStub(channel)
        found["healthy"] = api.Healthz(serve_pb2.HealthzRequest()).message
        names = api.ListApplications(serve_pb2.ListApplicationsRequest()).application_names
        found["applications"] = sorted(names)
        stub = serve_pb2_grpc.UserDefinedServiceStub(channel)
        message = serve_pb2.UserDefinedMessage(name="Ann", num=3, foo="here")
        answer, call = stub.__call__.with_call(request=message, metadata=(*to, ("request_id", "mine")))
        found["call"] = answer.greeting, answer.num_x2, dict(call.trailing_metadata())["request_id"]
        answer, call = stub.Method1.with_call(request=message, metadata=to)
        found["method1"] = answer.greeting, dict(call.trailing_metadata())["seen"]
        found["no name"] = failed(lambda: stub.Method1(serve_pb2.UserDefinedMessage(), metadata=to))
        model = (*to, ("multiplexed_model_id", "m7"))
        found["method2"] = stub.Method2(serve_pb2.UserDefinedMessage2(), metadata=model).greeting
        fail = serve_pb2.UserDefinedMessage(name="fail")
        found["failed"] = failed(lambda: stub.Method1(fail, metadata=to))
        found["stream"] = [part.greeting for part in stub.Streaming(message, metadata=to)]
        words = [serve_pb2.UserDefinedMessage(name=name) for name in ("ab", "cd", "ef")]
        found["to"] = stub.ClientStreaming(iter(words), metadata=to).greeting
        found["both"] = [part.greeting for part in stub.BidiStreaming(iter(words), metadata=to)]
        found["nowhere"] = failed(lambda: stub.Method1(message, metadata=(("application", "none"),)))
        found["which"] = failed(lambda: stub.Method1(message))[:1]
        fruit = serve_pb2_grpc.FruitServiceStub(channel)
        asked = serve_pb2.FruitAmounts(orange=4, apple=8)
        found["fruit"] = fruit.FruitStand(asked, metadata=(("application", "stand"),)).costs
    serve.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
