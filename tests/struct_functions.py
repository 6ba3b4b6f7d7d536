"""A mypy plugin: what `dataclasses` has for dataclasses refuses a msgspec Struct, which mypy alone takes for one."""

from mypy.plugin import FunctionContext, Plugin
from mypy.types import Instance, Type, get_proper_type


class StructFunctions(Plugin):
    def get_function_hook(self, fullname: str):
        return (
            checked if fullname in {f"dataclasses.{it}" for it in ("replace", "asdict", "astuple", "fields")} else None
        )


def checked(call: FunctionContext) -> Type:
    for given in map(get_proper_type, call.arg_types[0]):
        if isinstance(given, Instance) and given.type.has_base("msgspec.Struct"):
            call.api.fail(f"{given.type.name} is a Struct: take msgspec.structs", call.context)
    return call.default_return_type


def plugin(version: str) -> type[Plugin]:
    return StructFunctions
