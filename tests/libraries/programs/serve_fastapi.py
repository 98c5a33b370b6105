"""Serve and FastAPI: body models, dependencies, middleware, lifespan, routers, error handlers, forms of ingress."""

import contextlib
import json
import socket

import ray
import requests
from fastapi import APIRouter, BackgroundTasks, Depends, FastAPI, Header, HTTPException, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse
from pydantic import BaseModel, Field
from ray import serve
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route


class Item(BaseModel):
    name: str = Field(min_length=1)
    price: float = 1.0
    tags: list[str] = []


class Odd(Exception):
    pass


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI):
    app.state.started = "before the first request"
    yield


api = FastAPI(title="shop", lifespan=lifespan)
router = APIRouter(prefix="/v2", tags=["new"])


@router.get("/ping")
def ping() -> str:
    return "pong"


api.include_router(router)


def whose(token: str = Header(default="nobody", alias="x-token")) -> str:
    if token == "thief":
        raise HTTPException(status_code=401, detail="no entry")
    return token


@api.middleware("http")
async def count(request: Request, call_next):
    response = await call_next(request)
    response.headers["x-path"] = request.scope["path"]
    return response


@api.exception_handler(Odd)
async def odd(request: Request, error: Odd) -> JSONResponse:
    return JSONResponse(status_code=418, content={"odd": str(error)})


@api.get("/free")
def free(who: str = Depends(whose)) -> dict[str, str]:
    """A route outside of the class."""
    return {"who": who}


@serve.deployment
@serve.ingress(api)
class Shop:
    def __init__(self, currency: str) -> None:
        self.currency, self.items, self.noted = currency, {}, []

    @api.post("/items", status_code=201, response_model=Item)
    async def add(self, item: Item, background: BackgroundTasks, who: str = Depends(whose)) -> Item:
        self.items[item.name] = item
        background.add_task(self.noted.append, f"{who} {item.name}")
        return item

    @api.get("/items")
    def list(self, limit: int = 10, tag: str | None = None) -> dict:
        names = [name for name, item in self.items.items() if tag is None or tag in item.tags]
        return {"names": names[:limit], "currency": self.currency, "noted": self.noted}

    @api.get("/items/{name:path}")
    def one(self, name: str, response: Response) -> Item:
        if name == "odd":
            raise Odd(name)
        if name not in self.items:
            raise HTTPException(404, f"no {name}")
        response.set_cookie("last", name)
        return self.items[name]

    @api.get("/started")
    def started(self, request: Request) -> dict:
        return {"started": request.app.state.started, "root": request.scope["root_path"]}

    @api.get("/old")
    def old(self) -> RedirectResponse:
        return RedirectResponse("/shop/v2/ping")


plain = Starlette(routes=[Route("/hi", lambda request: PlainTextResponse(f"hi {request.query_params['who']}"))])


@serve.deployment
@serve.ingress(plain)
class Asgi:
    pass


def build() -> FastAPI:
    """Built in the replica: it need not be pickled."""
    made = FastAPI()
    made.state.lock = contextlib.ExitStack()

    @made.get("/built")
    def built() -> int:
        return 7

    return made


def main():
    ray.init(num_cpus=6)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve.start(http_options={"port": port})
    serve.run(Shop.bind("EUR"), name="shop", route_prefix="/shop")
    serve.run(Asgi.bind(), name="asgi", route_prefix="/asgi")
    serve.run(serve.deployment(serve.ingress(build)()).bind(), name="built", route_prefix="/")
    base, found = f"http://127.0.0.1:{port}", {}
    with requests.Session() as session:
        made = session.post(f"{base}/shop/items", json={"name": "tea", "price": "2.5", "tags": ["hot"]})
        found["made"] = made.status_code, made.json(), made.headers["x-path"]
        bad = session.post(f"{base}/shop/items", json={"name": "", "price": "much"})
        found["bad"] = bad.status_code, sorted(error["type"] for error in bad.json()["detail"])
        session.post(f"{base}/shop/items", json={"name": "ice/cream"}, headers={"x-token": "ann"})
        found["list"] = session.get(f"{base}/shop/items", params={"limit": 5}).json()
        found["tagged"] = session.get(f"{base}/shop/items?tag=hot").json()["names"]
        got = session.get(f"{base}/shop/items/ice/cream")
        found["one"] = got.json()["name"], got.cookies["last"]
        found["none"] = session.get(f"{base}/shop/items/x").json()
        odd = session.get(f"{base}/shop/items/odd")
        found["odd"] = odd.status_code, odd.json()
        found["thief"] = session.get(f"{base}/shop/free", headers={"x-token": "thief"}).status_code
        found["free"] = session.get(f"{base}/shop/free").json()
        found["started"] = session.get(f"{base}/shop/started").json()
        found["redirected"] = session.get(f"{base}/shop/old").json()
        found["method"] = session.delete(f"{base}/shop/items").status_code
        found["openapi"] = sorted(session.get(f"{base}/shop/openapi.json").json()["paths"])
        found["docs"] = session.get(f"{base}/shop/docs").status_code
        found["asgi"] = session.get(f"{base}/asgi/hi?who=you").text
        found["built"] = session.get(f"{base}/built").json()
        found["id"] = session.get(f"{base}/built", headers={"X-Request-ID": "mine"}).headers["x-request-id"]
        found["unknown"] = session.get(f"{base}/nothing").status_code
    serve.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
