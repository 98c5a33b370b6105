"""A plugin for mypy: `plugins = ["hpcray.mypy_plugin"]` in its configuration.

It knows what Python's types cannot say: the methods of an actor class, each with `.remote`, whether `@method` marks
them or not; `@remote` on a class; the arguments of constructors; an argument of type T that may also be an
`ObjectRef[T]`. `docs/how-to/typing.md` says what is checked with the plugin, and what without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from mypy.errorcodes import ATTR_DEFINED, CALL_ARG
from mypy.expandtype import expand_type_by_instance
from mypy.nodes import ARG_STAR, ARG_STAR2, Argument, Decorator, FuncDef, OverloadedFuncDef, TypeInfo, Var
from mypy.plugin import (
    AnalyzeTypeContext,
    AttributeContext,
    ClassDefContext,
    FunctionContext,
    MethodSigContext,
    Plugin,
)
from mypy.plugins.common import add_method_to_class
from mypy.typeops import bind_self, map_type_from_supertype
from mypy.types import (
    AnyType,
    CallableType,
    FunctionLike,
    Instance,
    Overloaded,
    Parameters,
    Type,
    TypeOfAny,
    TypeType,
    UnboundType,
    UnionType,
    UnpackType,
    get_proper_type,
)
from mypy.typevars import fill_typevars_with_any

_HANDLES = "hpcray.api.actor_handle"
_HANDLE = f"{_HANDLES}.ActorHandle"
_METHOD = f"{_HANDLES}.ActorMethod"
_STREAMING_METHOD = f"{_HANDLES}.StreamingMethod"
_ANY_METHOD = f"{_HANDLES}.AnyMethod"
_PROXY = f"{_HANDLES}.ActorProxy"
_CLASS = "hpcray.api.actor.ActorClass"
_FUNCTION = "hpcray.api.remote_function.RemoteFunction"
_STREAMING_FUNCTION = "hpcray.api.remote_function.StreamingFunction"
_REF = "hpcray.runtime.core_worker.object_refs.ObjectRef"
_REMOTE = "hpcray.api.decorator.remote"
_MARKS = tuple(f"hpcray.api.actor.{name}" for name in ("Method", "GeneratorMethod", "MethodOfMany"))
_COROUTINE = "typing.Coroutine"
_CALLS = {f"{owner}.remote" for owner in (_METHOD, _STREAMING_METHOD, _FUNCTION, _STREAMING_FUNCTION)}
_KEY = "hpcray"
"""Key in the metadata of an actor class."""


class HpcrayPlugin(Plugin):
    """The hooks, by the full names of what they are for."""

    def get_class_decorator_hook(self, fullname: str) -> Callable[[ClassDefContext], None] | None:
        """`@remote` on a class, before what inherits from it is looked at."""
        return _mark_actor_class if fullname == _REMOTE else None

    def get_class_decorator_hook_2(self, fullname: str) -> Callable[[ClassDefContext], bool] | None:
        """`@remote` on a class."""
        return _make_actor_class if fullname == _REMOTE else None

    def get_base_class_hook(self, fullname: str) -> Callable[[ClassDefContext], None] | None:
        """A class that inherits from an actor class."""
        return _refuse_subclass if self._is_actor_class(fullname) else None

    def get_function_hook(self, fullname: str) -> Callable[[FunctionContext], Type] | None:
        """A direct call of an actor class."""
        return _refuse_instance if self._is_actor_class(fullname) else None

    def get_method_signature_hook(self, fullname: str) -> Callable[[MethodSigContext], FunctionLike] | None:
        """`.remote` of functions, methods and classes."""
        if fullname in _CALLS:
            return partial(_call_signature, self)
        owner, _, name = fullname.rpartition(".")
        if name == "remote" and (owner == _CLASS or self._is_actor_class(owner)):
            return partial(_constructor_signature, self)
        return None

    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        """Methods of a handle."""
        owner, _, name = fullname.rpartition(".")
        return partial(_method_of_handle, self, name) if owner == _HANDLE else None

    def get_type_analyze_hook(self, fullname: str) -> Callable[[AnalyzeTypeContext], Type] | None:
        """`ActorProxy[T]`, which is `ActorHandle[T]` here."""
        return _proxy if fullname == _PROXY else None

    def instance(self, fullname: str, arguments: Sequence[Type]) -> Instance:
        """A type by its full name, wherever its module is imported."""
        found = self.lookup_fully_qualified(fullname)
        assert found is not None and isinstance(found.node, TypeInfo), fullname
        return Instance(found.node, arguments)

    def _is_actor_class(self, fullname: str) -> bool:
        found = self.lookup_fully_qualified(fullname) if "." in fullname else None
        return found is not None and isinstance(found.node, TypeInfo) and _KEY in found.node.metadata


def plugin(version: str) -> type[Plugin]:
    """Give the plugin to mypy."""
    return HpcrayPlugin


# -------------------------------------------------------------------- classes


def _mark_actor_class(context: ClassDefContext) -> None:
    context.cls.info.metadata[_KEY] = {"actor_class": True}


def _make_actor_class(context: ClassDefContext) -> bool:
    """Give a class that `@remote` decorates `remote` and `options`; the name stays usable in annotations."""
    info, api = context.cls.info, context.api
    handle = api.named_type_or_none(_HANDLE, [fill_typevars_with_any(info)])
    actor_class = api.named_type_or_none(_CLASS, [fill_typevars_with_any(info)])
    if handle is None or actor_class is None:
        return False
    anything = AnyType(TypeOfAny.explicit)
    rest = [
        Argument(Var("args", anything), anything, None, ARG_STAR),
        Argument(Var("kwargs", anything), anything, None, ARG_STAR2),
    ]
    add_method_to_class(api, context.cls, "remote", rest, handle, is_classmethod=True)
    add_method_to_class(api, context.cls, "options", rest[1:], actor_class, is_classmethod=True)
    return True


def _refuse_subclass(context: ClassDefContext) -> None:
    context.api.fail(
        f'"{context.cls.name}" inherits from an actor class; inherit from a plain class and make the derived class an '
        "actor class",
        context.reason,
    )


def _refuse_instance(context: FunctionContext) -> Type:
    made = get_proper_type(context.default_return_type)
    name = made.type.name if isinstance(made, Instance) else "the class"
    context.api.fail(f'Actors cannot be instantiated directly; use "{name}.remote()"', context.context, code=CALL_ARG)
    return context.default_return_type


def _constructor_signature(plugin: HpcrayPlugin, context: MethodSigContext) -> FunctionLike:
    """The arguments of the class's constructor; the result is a handle."""
    default = context.default_signature
    cls = _class_of(get_proper_type(context.type))
    if cls is None:
        return default
    handle = plugin.instance(_HANDLE, [cls])
    default = default.copy_modified(ret_type=handle)
    constructor = _bound_method(cls, "__init__", from_object=False)
    if constructor is None:
        if cls.type.get("__new__") is not None and cls.type["__new__"].node is not None:
            made = cls.type.get_method("__new__")
            if made is not None and made.info.fullname != "builtins.object":
                return default
        return default.copy_modified(arg_types=[], arg_kinds=[], arg_names=[])
    items = [
        _with_refs(plugin, context, item.arg_types, item).copy_modified(ret_type=handle, fallback=default.fallback)
        for item in constructor.items
    ]
    return items[0] if len(items) == 1 else default


def _class_of(owner: Type) -> Instance | None:
    """The user's class of an `ActorClass[T]`, or of a class that `@remote` decorates."""
    found: Type | None = None
    if isinstance(owner, Instance) and owner.type.fullname == _CLASS and owner.args:
        found = owner.args[0]
    elif isinstance(owner, TypeType):
        found = owner.item
    elif isinstance(owner, FunctionLike) and owner.is_type_obj():
        found = owner.items[0].ret_type
    found = get_proper_type(found) if found is not None else None
    return found if isinstance(found, Instance) else None


# -------------------------------------------------------------------- calls


def _call_signature(plugin: HpcrayPlugin, context: MethodSigContext) -> FunctionLike:
    """The parameters of a function or method, each of which may be given as a ref."""
    owner = get_proper_type(context.type)
    if not isinstance(owner, Instance) or len(owner.args) != 2:
        return context.default_signature
    parameters = get_proper_type(owner.args[0])
    if not isinstance(parameters, Parameters | CallableType):
        return context.default_signature
    return _with_refs(plugin, context, parameters.arg_types, parameters)


def _with_refs(
    plugin: HpcrayPlugin, context: MethodSigContext, types: list[Type], parameters: Parameters | CallableType
) -> CallableType:
    either = [
        argument
        if isinstance(get_proper_type(argument), AnyType | UnpackType)
        else UnionType.make_union([argument, plugin.instance(_REF, [argument])])
        for argument in types
    ]
    return context.default_signature.copy_modified(
        arg_types=either,
        arg_kinds=parameters.arg_kinds,
        arg_names=parameters.arg_names,
        variables=parameters.variables,
    )


# -------------------------------------------------------------------- methods of a handle


def _method_of_handle(plugin: HpcrayPlugin, name: str, context: AttributeContext) -> Type:
    """The method of this name of the handle's class, as what has `.remote`."""
    handle = get_proper_type(context.type)
    if not isinstance(handle, Instance) or not handle.args or name in handle.type.names:
        return context.default_attr_type
    cls = get_proper_type(handle.args[0])
    if not isinstance(cls, Instance):
        return context.default_attr_type
    symbol = cls.type.get(name)
    if symbol is None and cls.type.fallback_to_any:
        return context.default_attr_type
    node = symbol.node if symbol is not None else None
    if isinstance(node, Decorator) or (isinstance(node, Var) and node.type is not None):
        marked = get_proper_type((node.var if isinstance(node, Decorator) else node).type)
        if isinstance(marked, Instance) and marked.type.fullname in _MARKS:
            return _marked(plugin, _in_class(cls, marked, node.info), marked.type.fullname)
        if not isinstance(marked, CallableType | Overloaded | AnyType):
            node = None
    elif not isinstance(node, FuncDef | OverloadedFuncDef):
        node = None
    if node is None:
        context.api.fail(f'"{cls.type.name}" has no method "{name}"', context.context, code=ATTR_DEFINED)
        return AnyType(TypeOfAny.from_error)
    method = _bound_method(cls, name)
    if method is None or len(method.items) != 1:
        return context.default_attr_type
    only = method.items[0]
    function = node.func if isinstance(node, Decorator) else node
    yields = isinstance(function, FuncDef) and function.is_generator
    return _remote_method(plugin, Parameters(only.arg_types, only.arg_kinds, only.arg_names), only.ret_type, yields)


def _marked(plugin: HpcrayPlugin, mark: Type, kind: str) -> Type:
    mark = get_proper_type(mark)
    if not isinstance(mark, Instance) or kind == _MARKS[2]:
        return plugin.instance(_ANY_METHOD, [])
    name = _METHOD if kind == _MARKS[0] else _STREAMING_METHOD
    return plugin.instance(name, list(mark.args[:2]))


def _remote_method(plugin: HpcrayPlugin, parameters: Parameters, result: Type, yields: bool) -> Type:
    """Return the type of a call from outside: the value of a coroutine, a generator of refs, or a ref."""
    name, value = _METHOD, result
    given = get_proper_type(result)
    if isinstance(given, Instance) and given.type.fullname == _COROUTINE:
        value = given.args[2]
    elif isinstance(given, Instance) and yields and given.args:
        name, value = _STREAMING_METHOD, given.args[0]
    return plugin.instance(name, [parameters, value])


def _bound_method(cls: Instance, name: str, from_object: bool = True) -> FunctionLike | None:
    """The type of a method, bound to an instance; None where it has none."""
    symbol = cls.type.get(name)
    node = symbol.node if symbol is not None else None
    if not isinstance(node, FuncDef | OverloadedFuncDef | Decorator):
        return None
    if node.info.fullname == "builtins.object" and not from_object:
        return None
    found = get_proper_type(node.var.type if isinstance(node, Decorator) else node.type)
    if not isinstance(found, CallableType | Overloaded):
        return None
    plain = node.func if isinstance(node, Decorator) else node
    mapped = get_proper_type(_in_class(cls, found, node.info))
    if not isinstance(mapped, CallableType | Overloaded):
        return None
    if plain.is_static:
        return mapped
    return bind_self(mapped, TypeType.make_normalized(cls) if plain.is_class else cls, is_classmethod=plain.is_class)


def _in_class(cls: Instance, found: Type, owner: TypeInfo) -> Type:
    """A type of a base class, as the class has it."""
    return expand_type_by_instance(map_type_from_supertype(found, cls.type, owner), cls)


def _proxy(context: AnalyzeTypeContext) -> Type:
    given = context.type
    assert isinstance(given, UnboundType)
    return context.api.named_type(_HANDLE, [context.api.analyze_type(argument) for argument in given.args])
