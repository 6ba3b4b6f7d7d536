"""What a network process is started with, and who calls it by which token: without gRPC, which not every test has."""

from __future__ import annotations

import os

from programs import PATHS

OPERATOR_TOKEN = "operator-0123456789abcdef"
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([PATHS["PYTHONPATH"], *filter(None, [os.environ.get("PYTHONPATH")])]),
}


def token_of(tenant: str) -> str:
    """Its bearer token in these tests."""
    return f"{tenant}-token-0123456789abcdef"
