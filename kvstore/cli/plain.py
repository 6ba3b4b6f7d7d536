"""The command line where typer is not installed, as in an engine's environment: the version, help, and doctor, in plain
text. All else says in one line what there is to install."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import kvstore
from kvstore.block.errors import BadInput

FLAGS = {"store": ("data", "dram", "nvme"), "door": ("socket",)}
"""Settings that doctor takes as flags, by section."""


class _OneLine(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message} (see: kvstore doctor --help)")


def run(about: str, commands: str, needs: str) -> int:
    """Returns the status. needs: the line about what is not installed."""
    words = sys.argv[1:]
    asked, version = {*words}, kvstore.__version__
    if "--version" in asked <= {"--version", "--json"}:
        print(json.dumps({"version": version}) if "--json" in asked else f"kvstore {version}")
    elif asked <= {"--help", "-h"}:
        print(f"{about}\n\nThe library, the engines' adapters and doctor are installed. These commands are not:")
        print(f"{commands}.\n{needs.removeprefix('kvstore: ').capitalize()}")
    elif words[0] == "doctor":
        try:
            return doctor(words[1:])
        except (BadInput, OSError) as error:
            text = str(error)
            if isinstance(error, OSError) and error.filename:
                text = f"{error.filename}: {error.strerror}"
            print(f"kvstore: {' '.join(text.split())}", file=sys.stderr)
            return 2
    else:
        print(needs, file=sys.stderr)
        return 2
    return 0


def sidecar_settings(config: str | None, flags: Mapping[str, Mapping[str, Any]]) -> Any:
    """The settings of a file, of variables, and of flags by section. Raises `BadInput`, `OSError`."""
    from kvstore.service.settings import read_configuration, read_settings

    text = read_configuration(Path(config)) if config is not None else b""
    return read_settings(text, flags, config or "the configuration", os.environ)


def doctor(words: list[str]) -> int:
    """Status 1: something is missing. Raises `BadInput`, `OSError`."""
    from kvstore.doctor import checks_of, examine, read_transfer_config

    told = "What this machine, the sidecar's socket and an engine's configuration lack. Changes nothing."
    parser = _OneLine("kvstore doctor", description=told, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="The sidecar's settings, as for kvstore serve.")
    parser.add_argument("--engine", metavar="JSON|FILE", help="What vLLM is given as --kv-transfer-config.")
    for section, names in FLAGS.items():
        for name in names:
            parser.add_argument(f"--{name}", help=f"Setting {section}.{name} of the sidecar.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    given = vars(parser.parse_args(words))
    flags = {section: {name: given[name] for name in names} for section, names in FLAGS.items()}
    settings, engine = sidecar_settings(given["config"], flags), given["engine"]
    transfer = read_transfer_config(engine) if engine is not None else None
    found = examine(checks_of(settings, given["socket"] is not None, transfer))
    print(json.dumps(found.to_dict()) if given["json"] else "\n".join(found.lines()))
    return int(found.lacking > 0)
