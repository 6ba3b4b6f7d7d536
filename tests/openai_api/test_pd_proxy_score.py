"""`kvstore pd-proxy` asks the doors of real sidecars who knows most of a prompt, and that engine decodes it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from network.running import beside, network, token_file, token_of
from openai_api.running import RunningProxy
from openai_api.small_openai import Asked, SmallOpenAi
from service.sidecar import Sidecar
from waiting import wait_until
from workbench import ids, random_pages, small_layout

LAYOUT = small_layout()
NAME = "org/small model"
COMPLETIONS = "/v1/completions"


async def answers(asked: Asked) -> None:
    await asked.json({"choices": [{"text": "x"}]})


@pytest.mark.parametrize("knowing", [0, 1])
def test_the_engine_beside_the_sidecar_that_knows_the_prompt_decodes(knowing: int, tmp_path: Path) -> None:
    with ExitStack() as stack:
        flags = []
        for number in range(2):
            folder = tmp_path / str(number)
            folder.mkdir()
            sidecar = stack.enter_context(Sidecar(folder))
            store = stack.enter_context(sidecar.client())
            handle = store.namespace(model="3f5e1c0d9a", layout=LAYOUT, name=NAME)
            handle.put(ids(640 if number == knowing else 128), random_pages(LAYOUT, 10 if number == knowing else 2))
            door = beside(folder, token_file(folder, ("default",)), default=sidecar.path)
            running = stack.enter_context(network(*door, "--http", "127.0.0.1:0"))
            engine = SmallOpenAi({COMPLETIONS: answers})
            stack.callback(engine.close)
            flags += ["--decode", engine.url, "--score", f"http://127.0.0.1:{running.http_port}"]
        token = tmp_path / "token"
        token.write_text(token_of("default") + "\n")
        prefill = SmallOpenAi({COMPLETIONS: answers})
        stack.callback(prefill.close)
        more = ["--prefill", prefill.url, "--score-token-file", str(token)]
        proxy = stack.enter_context(RunningProxy(*flags, *more))

        def decoded_by() -> str | None:
            answer = proxy.ask(COMPLETIONS, {"model": NAME, "prompt": [*map(int, ids(650))]})
            assert answer.status == 200 and answer.body
            return answer.legs[1]

        wait_until(lambda: decoded_by() == f"decode-{knowing}")  # a door learns names a moment after they are there
        assert [decoded_by() for _ in range(4)] == [f"decode-{knowing}"] * 4
