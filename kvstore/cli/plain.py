"""The command line where typer is not installed, as in an engine's environment: the version, help, and doctor, in plain
text. All else says in one line what there is to install."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import NoReturn

import kvstore
from kvstore.block.errors import BadInput

FLAGS = {"data": "store", "dram": "store", "nvme": "store", "socket": "door"}
"""Settings that doctor takes as flags, and their sections."""


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


def doctor(words: list[str]) -> int:
    """Status 1: something is missing. Raises `BadInput`, `OSError`."""
    from kvstore.doctor import MOST_BYTES, checks_of, examine, read_transfer_config
    from kvstore.service.settings import read_configuration, read_settings
    from tiering.files import read_file

    told = "What this machine, the sidecar's socket and an engine's configuration lack. Changes nothing."
    parser = _OneLine("kvstore doctor", description=told, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="The sidecar's settings, as for kvstore serve.")
    parser.add_argument("--engine", metavar="JSON|FILE", help="What vLLM is given as --kv-transfer-config.")
    for name, section in FLAGS.items():
        parser.add_argument(f"--{name}", help=f"Setting {section}.{name} of the sidecar.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    given = vars(parser.parse_args(words))
    flags: dict[str, dict[str, str]] = {}
    for name, section in FLAGS.items():
        if given[name] is not None:
            flags.setdefault(section, {})[name] = given[name]
    config, engine = given["config"], given["engine"]
    text = read_configuration(Path(config)) if config is not None else b""
    settings = read_settings(text, flags, config or "the configuration", os.environ)
    if engine is not None and not engine.lstrip().startswith("{"):
        engine = read_file(Path(engine).expanduser(), MOST_BYTES).decode("utf-8", "replace")
    transfer = read_transfer_config(engine) if engine is not None else None
    found = examine(checks_of(settings, "door" in flags, transfer))
    print(json.dumps(found.to_dict()) if given["json"] else "\n".join(found.lines()))
    return int(found.lacking > 0)
