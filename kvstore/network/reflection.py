"""Server reflection: callers without the .proto files ask for the services and their messages.

For interactive tools. It is off unless `network.reflection` is set, and this file is imported only then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from grpc_reflection.v1alpha import reflection, reflection_pb2

NAME = reflection.SERVICE_NAME


def reflection_of(
    services: Sequence[str],
) -> tuple[Callable[[Iterator[Any], Any], Iterable[Any]], Callable[[bytes], Any], Callable[[Any], bytes]]:
    """For these services and itself: the answers to a stream's requests, the parser of requests, the serializer of
    answers."""
    servicer = reflection.ReflectionServicer([*services, NAME])
    kinds = reflection_pb2
    return (
        servicer.ServerReflectionInfo,
        kinds.ServerReflectionRequest.FromString,
        kinds.ServerReflectionResponse.SerializeToString,
    )
